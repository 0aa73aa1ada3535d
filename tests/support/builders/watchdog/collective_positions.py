"""Ranks given by the collectives that they have called, and the proof that these positions allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.verdict import Location

Call = tuple[str, str, int, int]  # group, operation, line, elements

GATHER: Call = ("0", "all_gather", 88, 3)
REDUCE: Call = ("0", "all_reduce", 91, 7)
LATER: Call = ("0", "all_reduce", 95, 7)
VOTE: Call = ("grpo_run/vote", "all_reduce", 12, 4)
STEP = [GATHER, REDUCE, VOTE]
PAST = STEP * 3


def at_line(line: int) -> Location:
    """A line of the user's script."""
    return Location(file="/home/user/train.py", line=line, function="main")


def ran(
    calls: Sequence[Call], *, last: CollectiveProgress = CollectiveProgress.waiting, **changes: Any
) -> tuple[Collective, ...]:
    """What a rank enqueued that made these calls; all but the last completed."""
    counts: Counter[str] = Counter()
    records = []
    for index, (group, operation, line, elements) in enumerate(calls):
        counts[group] += 1
        records.append(
            Collective(
                group=group, sequence=counts[group], operation=operation, sizes=((elements,),),
                dtypes=("Float",),
                progress=last if index == len(calls) - 1 else CollectiveProgress.completed,
                location=at_line(line),
            )
        )  # fmt: skip
    if changes:
        records[-1] = replace(records[-1], **changes)
    return tuple(records)


def judge(
    *records: tuple[Collective, ...] | Position | None, world_size: int | None = None
) -> Deadlock | None:
    """The proof for these ranks, in order. All threads of a rank that is given by its records wait."""
    positions = {
        rank: replace(given, rank=rank)
        if isinstance(given, Position)
        else without_other_threads(Position(rank=rank, records=given))
        for rank, given in enumerate(records)
    }
    return prove(positions, world_size=world_size or len(positions))


def proved(*records: tuple[Collective, ...] | Position | None, world_size: int | None = None) -> Deadlock:
    """The deadlock that these ranks are in."""
    found = judge(*records, world_size=world_size)
    assert found is not None
    return found


def after_exit(calls: Sequence[Call]) -> Position:
    """A rank whose script ended after these calls."""
    return Position(rank=0, records=ran(calls, last=CollectiveProgress.completed), exited=True)


PAIR: Call = ("pair", "all_reduce", 50, 2)


def in_backward(calls: Sequence[Call], reduced: int = 1) -> Position:
    """A rank whose main thread sleeps in a backward pass, with its last collectives issued by C++."""
    records = ran(calls, last=CollectiveProgress.enqueued)
    native = tuple(
        replace(record, progress=CollectiveProgress.enqueued, in_backward=True)
        for record in records[-reduced:]
    )
    return without_other_threads(Position(rank=0, records=(*records[:-reduced], *native), in_backward=True))
