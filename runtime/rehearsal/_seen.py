"""What was seen of one run of a rehearsal, and how two undisturbed runs differ. Pure, of plain values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.history.recovery import Recovery


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One run.

    Attributes:
        codes: exit codes of its supervisors; None for one that the deadline has ended.
        seconds: all of it.
        faults: that grpo-run has recovered, or has given up at.
        weights: digests at the last step, by call and rank; empty if it has not got there.
        sentence: how it has ended.
        resumed_at: the step that the second command continued from; None without one, or from the beginning.
        stopped_at: the last step before a stop or a kill from outside; None without one.
        left: processes that were left and had to be ended.
        traces: what its ranks noted.
        changed: by what a recovery has changed the job's results; "" if it has not.
        server: whether the run has started the rollout server that it uses; None without one.
        tool_seconds: the longest call of a tool or environment.
        ended_calls: of tools, as the table says it.
    """

    codes: tuple[int | None, ...]
    seconds: float
    faults: tuple[Recovery, ...] = ()
    weights: dict[str, str]
    sentence: str = ""
    resumed_at: int | None = None
    stopped_at: int | None = None
    left: tuple[str, ...] = ()
    traces: dict[str, list[dict[str, Any]]]
    changed: str = ""
    server: bool | None = None
    tool_seconds: float = 0.0
    ended_calls: tuple[str, ...] = ()


def read_traces(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank has noted; a line that a killed rank has begun is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        *lines, _ = file.read_text().split("\n")
        found[file.stem] = [json.loads(line) for line in lines]
    return found


def weights_of(traces: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the last digest of each rank and call at the last step, by both."""
    return {
        f"{rank}, call {line['call']}": line["given"]
        for rank, lines in traces.items()
        for line in lines
        if line["what"] == "weights" and line["step"] > 0
    }


def first_difference(
    one: dict[str, list[dict[str, Any]]], other: dict[str, list[dict[str, Any]]]
) -> str | None:
    """Return what differs first between two undisturbed runs; None if nothing does."""
    found = [
        (position, text)
        for rank in sorted(one.keys() | other.keys())
        for position, text in _differences(one.get(rank, []), other.get(rank, []))
    ]
    return min(found)[1] if found else None


def _differences(
    one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> Iterable[tuple[tuple[int, int, int], str]]:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            yield (left["call"], left["step"], index), _named(left, right)
            return
    if len(one) != len(other):
        yield (1 << 30, 0, 0), f"one run noted {len(one)} values, the other {len(other)}"


def _named(left: dict[str, Any], right: dict[str, Any]) -> str:
    step, what = left["step"], left["what"]
    if (step, what) != (right["step"], right["what"]):
        return (
            f"one run did {what} at step {step} where the other did {right['what']} at step {right['step']}"
        )
    if what == "weights":
        if step == 0:
            return "the weights before the first step differ: seed the model's initialization"
        return (
            f"the weights after step {step} differ although data and rewards are equal: an operation is not"
        )
    if what in ("prompts", "batch"):
        return (
            f"the data differs at step {step}: the rows, or their order, come from a generator without a seed"
        )
    name = what.removeprefix("reward ")
    if left["given"] != right["given"]:
        return f"the completions of step {step} differ: generation draws from a generator without a seed"
    pairs = zip(left["got"], right["got"], strict=False)
    values = next((f"{one} and {other}" for one, other in pairs if one != other), "in their number")
    return f"reward `{name}` differs between two calls with the same arguments ({values}, step {step})"
