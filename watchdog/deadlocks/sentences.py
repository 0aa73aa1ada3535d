"""A deadlock in one line: which ranks are in which collective, at which line, and who is wrong.

Called by `proof.py`. Only words; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath

from grpo_run.watchdog.deadlocks.collectives import DEFAULT_GROUP, Collective
from grpo_run.watchdog.verdict import Location


def operands(collective: Collective) -> str:
    """The operation with its inputs: `all_reduce [[7]] Float`."""
    parts = [collective.operation]
    if collective.sizes:
        parts.append(str([list(size) for size in collective.sizes]))
    parts.extend(dict.fromkeys(collective.dtypes))
    return " ".join(parts)


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`; four or more consecutive ranks are a range: `ranks 0 to 6 and 9`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words.extend([f"{run[0]} to {run[-1]}"] if len(run) > 3 else [str(rank) for rank in run])
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def sentence(
    stands: Mapping[int, Collective],
    culprits: Sequence[int],
    locations: Mapping[int, Location],
    *,
    left: bool,
    gone: AbstractSet[int],
) -> str:
    """What holds the ranks in `stands` up; `left` when the culprits ended or are out of training."""
    right = [rank for rank in sorted(stands) if rank not in culprits]
    if left:
        away = named(culprits)
        have, them = ("has", "it") if len(culprits) == 1 else ("have", "them")
        still = "" if all(rank in gone for rank in culprits) else " training"
        waits = [
            f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {them} in {place}"
            for place, ranks in _places(right, stands, locations, inputs=False).items()
        ]
        return f"Deadlocked: {away} {have} left{still} while {_and(waits)}."
    inputs = len({(here.group, here.sequence, here.operation) for here in stands.values()}) == 1
    wrong = [rank for rank in sorted(culprits) if rank in stands] or right[:1]
    if not culprits:  # those in the same place as the first rank belong on its side
        sides = _places(right, stands, locations, inputs=inputs)
        wrong = next(iter(sides.values()))
        right = [rank for rank in right if rank not in wrong]
    clauses = [
        _and(
            f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place}"
            for place, ranks in _places(side, stands, locations, inputs=inputs).items()
        )
        for side in (wrong, right)
        if side
    ]
    doubt = "" if culprits else "; cannot tell which is wrong"
    return f"Deadlocked: {' while '.join(clauses)}{doubt}."


def _and(clauses: Iterable[str]) -> str:
    listed = list(clauses)
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def _places(
    ranks: Sequence[int],
    stands: Mapping[int, Collective],
    locations: Mapping[int, Location],
    *,
    inputs: bool,
) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for rank in ranks:
        here, location = stands[rank], locations.get(rank)
        line = f"{PurePath(location.file).name}:{location.line}, " if location else ""
        group = "" if here.group == DEFAULT_GROUP else f" of group {here.group}"
        what = operands(here) if inputs else here.operation
        places.setdefault(f"{what} ({line}#{here.sequence}{group})", []).append(rank)
    return places
