"""One rank's history of collectives: Flight Recorder entries joined with the entries of its collective log.

Called by `runtime.detection.collective_records`. Pure; does not judge. A group whose two records contradict
each other is excluded from proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.completion import can_meet


def merge(recorded: Sequence[Collective], logged: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return one rank's collectives from both sources, in the order in which they were enqueued.

    Entries are joined by group and sequence number. The recorder says what was enqueued and whether it has
    completed; the log adds the line, the step, the members, the root and whether a thread waits. An entry of
    only one source keeps its position.
    """
    logged = exclude_reused_groups(tuple(entry for entry in logged if entry.count))
    named = {_key(entry) for entry in logged if entry.operation != BACKWARD}
    entries = [entry for entry in logged if entry.operation != BACKWARD or _key(entry) not in named]
    indices = {_key(entry): index for index, entry in enumerate(entries)}
    known = {_key(record) for record in recorded}
    backwards = {
        entry.group: entry.sequence for entry in logged if entry.operation == BACKWARD and not entry.completed
    }
    merged: list[Collective] = []
    placed = 0  # log entries before this index are in `merged` or in `recorded`
    for record in recorded:
        index = indices.get(_key(record))
        if _key(record) not in named and record.sequence >= backwards.get(record.group, record.sequence + 1):
            record = replace(record, in_backward=True)
        if index is None:
            merged.append(record)
            continue
        merged.extend(entry for entry in entries[placed:index] if _key(entry) not in known)
        placed = max(placed, index)
        merged.append(_joined(record, entries[index]))
    merged.extend(entry for entry in entries[placed:] if _key(entry) not in known)
    return _exclude(merged, _contradictory_groups(recorded, logged))


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
    return _exclude(records, reused)


def _contradictory_groups(recorded: Sequence[Collective], logged: Sequence[Collective]) -> set[str]:
    """Groups of which the log names a collective that the recorder does not have or knows as another one.

    The log's numbers are then not the recorder's: something that is not logged has counted in only one of
    the two. The recorder is read first, so an entry may also be newer than its answer.
    """
    by_key = {_key(record): record for record in recorded if not record.point_to_point}
    oldest: dict[str, int] = {}
    for group, sequence, _ in by_key:
        oldest[group] = min(sequence, oldest.get(group, sequence))
    return {
        entry.group
        for entry in logged
        if not entry.point_to_point
        and entry.operation != BACKWARD
        and entry.group in oldest
        and entry.sequence >= oldest[entry.group]
        and not _is_same(by_key.get(_key(entry)), entry)
    }


def _is_same(record: Collective | None, entry: Collective) -> bool:
    return record is not None and can_meet(record, entry)


def _exclude(records: Iterable[Collective], groups: set[str]) -> tuple[Collective, ...]:
    return tuple(
        replace(record, point_to_point=True) if record.group in groups else record for record in records
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
        root=entry.root if entry.root >= 0 else record.root,
        step=entry.step if entry.step >= 0 else record.step,
        thread=(waits and entry.thread) or record.thread or entry.thread,
        timeout_seconds=min(record.timeout_seconds, entry.timeout_seconds),
    )
