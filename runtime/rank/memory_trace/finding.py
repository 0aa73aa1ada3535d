"""A finding of a memory trace: what is kept, since when, where it was made, who holds it; its sentence.

Made by `making.py`, written to the journal as fields by `attach.py`. The terminal, the status and the
reports show the sentence from there. Plain data and pure functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_run.watchdog.text import size_text

KINDS = ("growth", "graph", "cycle", "traceback", "padding", "dropped_graph", "growing")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of a file, and the function there."""

    file: str
    line: int | None
    function: str | None = None


@dataclass(frozen=True, kw_only=True)
class TraceFinding:
    """What was found.

    Attributes:
        kind: one of `KINDS`.
        tensors: how many are alive.
        bytes: what their storages take.
        shape: of the newest, with its `dtype`.
        since_step: the step in which the oldest was made.
        steps: in how many steps it grew, or was seen.
        made_at: the line of the script; None if it was not recorded.
        made_in: the line of a library below it.
        holder: in words, `list 'history' of Collector`; None if nothing that has a name holds it.
        held_at: where the holder is assigned, or the exception was raised.
        details: further figures of the kind.
    """

    kind: str
    tensors: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    since_step: int
    steps: int
    made_at: Place | None = None
    made_in: Place | None = None
    holder: str | None = None
    held_at: Place | None = None
    details: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for the same finding of another rank or attempt: kind, holder, and the line where that is or what it holds is made."""
        place = self.held_at or self.made_at
        where = [place.file, str(place.line)] if place is not None else list(map(str, self.shape[1:]))
        return "|".join([self.kind, self.holder or "", *where])

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


ADVICE = {
    "growing": "it has {grown}; cannot tell whether that ends",
    "graph": "nothing has run backward through it in {steps} steps; compute it under torch.no_grad(), or detach it",
    "cycle": "only a garbage collection frees it; break the cycle, or hold one side by a weak reference",
    "graph_end": "each of {steps} steps has added its graph; detach what is added",
    "traceback": "it was there after {steps} steps; keep the exception's text, not the exception",
    "growth": (
        "it has {grown}, {rate} a step, which does not fit into {free} for the {steps_left} steps that are left;"
        " bound it, or keep less"
    ),
}


def sentence(finding: TraceFinding, working_directory: str) -> str:
    """Return one line: what, since when, made where, held by whom, and what follows.

    Args:
        working_directory: paths below it are shown relative to it.
    """
    if finding.kind == "padding":
        return _padding(finding, working_directory)
    if finding.kind == "dropped_graph":
        return _dropped(finding, working_directory)
    figures, grown = finding.details, f"kept tensors of {finding.steps} steps"
    number = count(finding.tensors, "tensor")
    begun = f"{'that only garbage collections have freed' if figures.get('collected') else 'alive'} since step {finding.since_step}"
    if "first_bytes" in figures:
        number, grown = "a tensor", f"become longer in {finding.steps} steps"
        begun = f"from {size_text(figures['first_bytes'])} in step {figures['first_step']}"
    what = f"{number} {_shape(finding.shape)} {finding.dtype} ({size_text(finding.bytes)}) {begun}"
    parts = [what, _made(finding, working_directory), _held(finding, working_directory)]
    advice = ADVICE["graph_end" if figures.get("ends_graph") else finding.kind].format(
        steps=finding.steps, grown=grown, rate=size_text(figures.get("bytes_a_step", 0)),
        free=size_text(figures.get("free_bytes", 0)), steps_left=figures.get("steps_left", 0),
    )  # fmt: skip
    still = "still growing: " if finding.kind == "growing" else ""
    return f"{still}{', '.join(filter(None, parts))}: {advice}"


def subject(finding: TraceFinding, working_directory: str) -> str:
    """Return what tells one finding from another for a reader: the holder, or else the line that has made it."""
    if finding.holder is not None:
        return _held(finding, working_directory)
    return _made(finding, working_directory) or f"batches {_shape(finding.shape)}"


def _held(finding: TraceFinding, working_directory: str) -> str:
    holder = finding.holder or "something that has no name in the script"
    at = f" ({place(finding.held_at, working_directory)})" if finding.held_at is not None else ""
    if finding.details.get("ends_graph"):
        return f"saved by the autograd graph that ends in {holder}{at}"
    if finding.kind == "graph":
        return f"saved by the autograd graph of a tensor that is held by {holder}{at}"
    return f"held by {holder}{at}"


def _made(finding: TraceFinding, working_directory: str) -> str:
    if finding.made_at is None:
        return ""
    inside = f" (in {place(finding.made_in, working_directory)})" if finding.made_in is not None else ""
    return f"made at {place(finding.made_at, working_directory)}{inside}"


def _padding(finding: TraceFinding, working_directory: str) -> str:
    figures = finding.details
    made = _made(finding, working_directory)
    return (
        f"batches {_shape(finding.shape)} are padded to {figures['width']} tokens, of which the longest row of"
        f" {count(finding.tensors, 'batch', 'batches')} in {finding.steps} steps uses {figures['longest']} and"
        f" {figures['share']:.0%} are real{', ' + made if made else ''}: pad to the longest row of a batch"
    )


def _dropped(finding: TraceFinding, working_directory: str) -> str:
    made = _made(finding, working_directory)
    return (
        f"autograd graphs of at least {count(finding.tensors, 'call')} of the model ({size_text(finding.bytes)}) were kept at once"
        f" in {count(finding.steps, 'step')}{', ' + made if made else ''}, and dropped without a backward pass:"
        " call it under torch.no_grad()"
    )


def place(one: Place, working_directory: str) -> str:
    """Return a place as `file.py:12`."""
    file = (
        os.path.relpath(one.file, working_directory)
        if one.file.startswith(f"{working_directory}/")
        else one.file
    )
    for folder in ("/site-packages/", "/dist-packages/"):
        file = file.rpartition(folder)[2]
    return file if one.line is None else f"{file}:{one.line}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
