"""A finding of a memory trace: what is kept, since when, where it was made, who holds it; its sentence.

Made from what the other modules have observed, and written to the journal as fields by `tracer.py`. The
terminal, the status and the reports show the sentence from there. Decides nothing. Plain data and pure
functions.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.rank.memory_trace._census import Group, Site, StorageEntry
from grpo_run.runtime.rank.memory_trace._cycles import Collected, Cycle
from grpo_run.runtime.rank.memory_trace._growth import Longer
from grpo_run.runtime.rank.memory_trace._holders import Holder
from grpo_run.runtime.rank.memory_trace._kept_exceptions import KeptException
from grpo_run.runtime.rank.memory_trace._names import Name
from grpo_run.runtime.rank.memory_trace._padding import Padded
from grpo_run.watchdog.evidence.source import is_outside_frameworks
from grpo_run.watchdog.text import size_text


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
        kind: a key of `ADVICE`, without `graph_end`.
        tensors: how many are alive.
        bytes: what their storages take.
        shape: of the newest, with its `dtype`.
        since_step: the step in which the oldest was made.
        steps: in how many steps it grew, or was seen.
        made_at: the line of the script; None if it was not recorded.
        made_in: the line of a library below it.
        holder: in words, `list 'history' of Collector`; None if nothing that has a name holds it.
        held_at: where the function or class of the holder begins, or the exception was raised.
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
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for the same finding of another rank or attempt: kind, holder, and where that begins."""
        place = self.held_at or self.made_at
        where = [place.file, str(place.line)] if place is not None else list(map(str, self.shape[1:]))
        return "|".join([self.kind, self.holder or "", *where])


def of_holder(
    holder: Holder, held: Collection[StorageEntry], kind: str, details: dict[str, Any]
) -> TraceFinding:
    """Return what a holder keeps.

    Args:
        held: storages that the holder keeps, or those that its graph has saved.
        kind: `growing`, `growth` or `graph`.
        details: of the growth.
    """
    unnamed = f"{_article(holder.kind)} without a name"
    return _of_entries(
        kind, held, holder=named(holder.name, holder.kind) if holder.name is not None else unnamed,
        held_at=_place_of(holder.name), details={"ends_graph": holder.ends_graph, **details},
    )  # fmt: skip


def of_longer(
    longer: Longer, entry: StorageEntry, name: Name, kind: str, details: dict[str, Any]
) -> TraceFinding:
    """Return a tensor that is replaced by a longer one step after step."""
    return _of_entries(
        kind, [entry], steps=longer.steps, holder=named(name, "Tensor"), held_at=_place_of(name),
        details={"first_step": longer.first_step, "first_bytes": longer.first_bytes, **details},
    )  # fmt: skip


def of_cycle(cycle: Cycle, entries: Collection[StorageEntry]) -> TraceFinding:
    """Return a cycle that keeps storages until garbage is collected."""
    return _of_entries("cycle", entries, **_cycle_fields(cycle))


def of_collected(cycle: Cycle, group: Group, collected: Collected) -> TraceFinding:
    """Return a cycle whose tensors were freed by collections."""
    return TraceFinding(
        kind="cycle", tensors=collected.tensors, bytes=collected.bytes, shape=collected.shape,
        dtype=group.dtype, since_step=min(collected.steps), steps=len(collected.steps),
        details={"collected": True}, **_made_fields(collected.site), **_cycle_fields(cycle),
    )  # fmt: skip


def of_exception(kept: KeptException) -> TraceFinding:
    """Return an exception that keeps the local variables of a function."""
    by = f" that {named(kept.name)} keeps" if kept.name is not None else ""
    at = _place_of(kept.name)
    return _of_entries(
        "traceback", kept.entries, steps=kept.steps, holder=f"the traceback of {kept.error}{by}, raised",
        held_at=Place(file=kept.file, line=kept.line, function=kept.function),
        details={"kept_at": None if at is None else {"file": at.file, "line": at.line}},
    )  # fmt: skip


def of_padding(padded: Padded) -> TraceFinding:
    """Return calls that are padded to the longest possible."""
    return TraceFinding(
        kind="padding", tensors=padded.batches, bytes=0, shape=(padded.rows, padded.width),
        dtype=padded.group.dtype, since_step=padded.first_step, steps=padded.steps,
        details={"width": padded.width, "longest": padded.longest, "share": round(padded.share, 4)},
        **_made_fields(padded.made or padded.site),
    )  # fmt: skip


def _of_entries(kind: str, entries: Iterable[StorageEntry], **fields: Any) -> TraceFinding:
    """Return a finding of storages; of several kinds of tensors, the one that takes most is shown."""
    groups: dict[Group, list[StorageEntry]] = defaultdict(list)
    for one in entries:
        groups[one.group].append(one)
    shown = max(groups.values(), key=lambda alike: sum(one.bytes for one in alike))
    newest = max(shown, key=lambda one: (one.born, one.bytes))
    sites = Counter(one.site for one in shown if one.site is not None)
    made = _made_fields(sites.most_common(1)[0][0] if sites else None)
    steps = fields.pop("steps", len({one.born for one in shown}))
    return TraceFinding(
        kind=kind, tensors=len(shown), bytes=sum(one.bytes for one in shown), shape=newest.shape,
        dtype=newest.group.dtype, since_step=min(one.born for one in shown), steps=steps, **made, **fields,
    )  # fmt: skip


def _made_fields(site: Site | None) -> dict[str, Any]:
    if site is None:
        return {}
    inside = Place(file=site.library_file, line=site.library_line) if site.library_file is not None else None
    return {"made_at": Place(file=site.file, line=site.line, function=site.function), "made_in": inside}


def _cycle_fields(cycle: Cycle) -> dict[str, Any]:
    through = f" through its attribute `{cycle.attribute}`" if cycle.attribute else ""
    held_at = Place(file=cycle.file, line=cycle.line) if cycle.file else None
    return {"holder": f"a reference cycle of {cycle.kind}{through}", "held_at": held_at}


def _place_of(name: Name | None) -> Place | None:
    if name is None or not is_outside_frameworks(name.variable.file):
        return None
    return Place(file=name.variable.file, line=name.variable.line, function=name.variable.function)


def named(name: Name, kind: str | None = None) -> str:
    """Return a name as `list 'history' of Collector`.

    Args:
        kind: class of the object, if only something that holds it may have the name.
    """
    variable = name.variable
    of = f" of {variable.owner}" if variable.owner is not None else ""
    of = of or (f" in {variable.function}()" if variable.function is not None else "")
    text = f"{_lower(name.kind)} `{variable.name}`{of}"
    return f"{_article(kind)} in {text}" if name.inside and kind is not None else text


def _lower(kind: str) -> str:
    return "tensor" if kind == "Tensor" else kind


def _article(kind: str) -> str:
    return f"{'an' if kind[:1].lower() in 'aeio' else 'a'} {_lower(kind)}"


ADVICE = {
    "growing": "it has {grown}; cannot tell whether that ends",
    "growth": (
        "it has {grown}, {rate} a step, which does not fit into {free} for the {steps_left} steps that are"
        " left; bound it, or keep less"
    ),
    "graph": (
        "nothing has run backward through it in {steps} steps; compute it under torch.no_grad(), or detach it"
    ),
    "graph_end": "each of {steps} steps has added its graph; detach what is added",
    "cycle": "only a garbage collection frees it; break the cycle, or hold one side by a weak reference",
    "traceback": "it was there after {steps} steps; keep the exception's text, not the exception",
    "padding": "pad to the longest row of a batch",
}


def sentence(finding: TraceFinding, working_directory: str) -> str:
    """Return one line: what, since when, made where, held by whom, and what follows.

    Args:
        working_directory: paths below it are shown relative to it.
    """
    figures, grown = finding.details, f"kept tensors of {finding.steps} steps"
    shape, size = _shape(finding.shape), size_text(finding.bytes)
    if finding.kind == "padding":
        what = (
            f"batches {shape} are padded to {figures['width']} tokens, of which the longest row of"
            f" {finding.tensors:,} batches in {finding.steps} steps uses"
            f" {figures['longest']} and {figures['share']:.0%} are real"
        )
    elif "first_bytes" in figures:
        grown = f"become longer in {finding.steps} steps"
        before = f"from {size_text(figures['first_bytes'])} in step {figures['first_step']}"
        what = f"a tensor {shape} {finding.dtype} ({size}) {before}"
    else:
        freed = figures.get("collected")
        begun = "that only garbage collections have freed" if freed else "alive"
        tensors = f"{finding.tensors:,} tensor{'s' * (finding.tensors != 1)} {shape} {finding.dtype} ({size})"
        what = f"{tensors} {begun} since step {finding.since_step}"
    held = _held(finding, working_directory) if finding.kind != "padding" else ""
    advice = ADVICE["graph_end" if figures.get("ends_graph") else finding.kind].format(
        steps=finding.steps, grown=grown, rate=size_text(figures.get("bytes_a_step", 0)),
        free=size_text(figures.get("free_bytes", 0)), steps_left=figures.get("steps_left", 0),
    )  # fmt: skip
    still = "still growing: " if finding.kind == "growing" else ""
    parts = ", ".join(filter(None, [what, _made(finding, working_directory), held]))
    return f"{still}{parts}: {advice}"


def subject(finding: TraceFinding, working_directory: str) -> str:
    """Return what tells one finding from another for a reader: the holder, or else where it was made."""
    if finding.holder is not None:
        return _held(finding, working_directory)
    return _made(finding, working_directory) or f"batches {_shape(finding.shape)}"


def _held(finding: TraceFinding, working_directory: str) -> str:
    holder = finding.holder or "something that has no name in the script"
    at = f" ({place(finding.held_at, working_directory)})" if finding.held_at is not None else ""
    by = "held by"
    if finding.kind == "graph":
        ends = finding.details.get("ends_graph")
        by = f"saved by the autograd graph {'that ends in' if ends else 'of a tensor that is held by'}"
    return f"{by} {holder}{at}"


def _made(finding: TraceFinding, working_directory: str) -> str:
    if finding.made_at is None:
        return ""
    inside = f" (in {place(finding.made_in, working_directory)})" if finding.made_in is not None else ""
    return f"made at {place(finding.made_at, working_directory)}{inside}"


def place(one: Place, working_directory: str) -> str:
    """Return a place as `file.py:12`."""
    inside = one.file.startswith(f"{working_directory}/")
    file = os.path.relpath(one.file, working_directory) if inside else one.file
    for folder in ("/site-packages/", "/dist-packages/"):
        file = file.rpartition(folder)[2]
    return file if one.line is None else f"{file}:{one.line}"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
