"""A proved deadlock: its cause, the culprits, what each rank is in, and the sentence about it.

`proof.py` builds it. The sentence names each rank's collective and source line and the rank at fault.
`watchdog/diagnosis/_hangs.py` turns the result into a verdict. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePath

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import (
    CONSENSUS_GROUP,
    DEFAULT_GROUP,
    Collective,
    element_count,
    python_dtype_name,
)
from grpo_run.watchdog.text import join_words, rank_names
from grpo_run.watchdog.verdict import Location


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlock:
    """A proved deadlock. `culprits` is empty if the records do not tell which rank is at fault.

    `at` is the collective that each observed rank is in, or its last one; None if it has none. `mismatch`
    compares the two operations that cannot complete one another.
    """

    cause: Cause
    culprits: tuple[int, ...]
    waiters: tuple[int, ...]
    at: Mapping[int, Collective | None]
    locations: Mapping[int, Location]
    mismatch: str | None
    sentence: str


MAX_SHAPES = 3
"""Shapes of more tensors are summed up."""
MAX_CALLS = 3
"""Ranks of which the last consensus call is named."""


def describe_operation(collective: Collective) -> str:
    """Describe an operation with its inputs, as `all_reduce of 5 float32 elements`."""
    if not collective.sizes and not collective.dtypes:
        return collective.operation
    words = [collective.operation, "of"]
    if len(collective.sizes) > MAX_SHAPES:
        words.append(str(element_count(collective)))
    elif collective.sizes:
        words.append(" + ".join("×".join(map(str, size)) or "1" for size in collective.sizes))
    if collective.dtypes:
        words.append("/".join(dict.fromkeys(map(python_dtype_name, collective.dtypes))))
    words.append("element" if collective.sizes and element_count(collective) == 1 else "elements")
    if len(collective.sizes) > MAX_SHAPES:
        words.append(f"in {len(collective.sizes)} tensors")
    return " ".join(words)


def describe_last_calls(calls: Mapping[int, Collective]) -> str:
    """Return a sentence on the last consensus call of ranks that others wait for; empty without any."""
    said = [
        f"the last consensus call of rank {rank} was call {call.sequence}"
        + (f" at {PurePath(call.location.file).name}:{call.location.line}" if call.location else "")
        for rank, call in sorted(calls.items())
    ]
    text = join_words(said[:MAX_CALLS])
    return f"{text[0].upper()}{text[1:]}." if text else ""


def describe_deadlock(
    stuck: Mapping[int, Collective],
    culprits: Sequence[int],
    locations: Mapping[int, Location],
    *,
    absent: AbstractSet[int],
    exited: AbstractSet[int],
) -> str:
    """Return what keeps the ranks in `stuck` from continuing, as one sentence.

    Args:
        absent: ranks that are waited for and that have exited or are outside training.
        exited: ranks whose process has exited.
    """
    doubt = "" if culprits else "; the records do not tell which is at fault"
    if absent:
        have, pronoun = ("has", "it") if len(absent) == 1 else ("have", "them")
        gone = f"{rank_names(sorted(absent))} {have} {'exited' if absent <= exited else 'left training'}"
        wrong = [rank for rank in sorted(stuck) if rank in culprits and rank not in absent]
        if wrong:
            return f"Deadlock: {_clause(wrong, stuck, locations)} while {gone}."
        right = [rank for rank in sorted(stuck) if rank not in absent]
        waits = [
            f"{rank_names(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {pronoun} in {place}"
            for place, ranks in _places(right, stuck, locations, inputs=False).items()
        ]
        return f"Deadlock: {gone} while {join_words(waits)}{doubt}."
    right = [rank for rank in sorted(stuck) if rank not in culprits]
    inputs = len({(here.group, here.sequence, here.operation) for here in stuck.values()}) == 1
    wrong = [rank for rank in sorted(culprits) if rank in stuck] or right[:1]
    if not culprits:  # ranks in the same place as the first rank belong to its side
        sides = _places(right, stuck, locations, inputs=inputs)
        wrong = next(iter(sides.values()))
        right = [rank for rank in right if rank not in wrong]
    clauses = [_clause(side, stuck, locations, inputs=inputs) for side in (wrong, right) if side]
    return f"Deadlock: {' while '.join(clauses)}{doubt}."


def _clause(
    ranks: Sequence[int],
    stuck: Mapping[int, Collective],
    locations: Mapping[int, Location],
    *,
    inputs: bool = False,
) -> str:
    """Say where ranks are."""
    return join_words(
        f"{rank_names(there)} {'is' if len(there) == 1 else 'are'} in {place}"
        for place, there in _places(ranks, stuck, locations, inputs=inputs).items()
    )


def _places(
    ranks: Sequence[int], stuck: Mapping[int, Collective], locations: Mapping[int, Location], *, inputs: bool
) -> dict[str, list[int]]:
    """Group ranks by the description of the collective they are in; `inputs` adds sizes and dtypes."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        here, location = stuck[rank], locations.get(rank)
        line = f"{PurePath(location.file).name}:{location.line}, " if location else ""
        if here.group == CONSENSUS_GROUP:
            what, number = "consensus", f"call {here.sequence}"
        else:
            what = describe_operation(here) if inputs else here.operation
            number = f"#{here.sequence}" + ("" if here.group == DEFAULT_GROUP else f" of group {here.group}")
        places.setdefault(f"{what} ({line}{number})", []).append(rank)
    return places
