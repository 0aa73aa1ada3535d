"""One rank's history of collectives: Flight Recorder entries joined with the entries of its collective log.

Called by `runtime.detection.collective_records`. Pure; does not judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress


def merge(recorded: Sequence[Collective], logged: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return one rank's collectives from both sources, in the order in which they were enqueued.

    Entries are joined by group and sequence number. The recorder says what was enqueued and whether it has
    completed; the log adds the line, the step, the members and whether a thread waits. An entry of only one
    source keeps its position.
    """
    logged = exclude_reused_groups(tuple(logged))
    named = {_key(entry) for entry in logged if entry.operation != BACKWARD}
    entries = [entry for entry in logged if entry.operation != BACKWARD or _key(entry) not in named]
    indices = {_key(entry): index for index, entry in enumerate(entries)}
    known = {_key(record) for record in recorded}
    merged: list[Collective] = []
    placed = 0  # log entries before this index are in `merged` or in `recorded`
    for record in recorded:
        index = indices.get(_key(record))
        if index is None:
            merged.append(record)
            continue
        merged.extend(entry for entry in entries[placed:index] if _key(entry) not in known)
        placed = max(placed, index)
        merged.append(_joined(record, entries[index]))
    merged.extend(entry for entry in entries[placed:] if _key(entry) not in known)
    return tuple(merged)


def exclude_reused_groups(records: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Exclude from proof every group whose sequence numbers decrease.

    Such a group was destroyed and created again under its name. One number then stands for two collectives,
    and other ranks may still be in the earlier group. Excluded records are marked as point-to-point.
    """
    highest: dict[str, int] = {}
    reused = set()
    for record in records:
        if record.point_to_point or record.operation == BACKWARD:
            continue
        if record.sequence < highest.get(record.group, 0):
            reused.add(record.group)
        highest[record.group] = max(record.sequence, highest.get(record.group, 0))
    return tuple(
        replace(record, point_to_point=True) if record.group in reused else record for record in records
    )


def _key(collective: Collective) -> tuple[str, int, bool]:
    return collective.group, collective.sequence, collective.point_to_point


def _joined(record: Collective, entry: Collective) -> Collective:
    waits = entry.progress is CollectiveProgress.waiting and not record.completed
    return replace(
        record,
        progress=CollectiveProgress.waiting if waits else record.progress,
        location=entry.location or record.location,
        members=entry.members or record.members,
        step=entry.step if entry.step >= 0 else record.step,
        thread=record.thread or entry.thread,
        waiter=entry.waiter,
    )
