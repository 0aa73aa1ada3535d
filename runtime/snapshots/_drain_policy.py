"""Decide which snapshot is drained next, and which ones a checkpoint on disk supersedes. Pure.

Called by `drain_scheduler.py`, which sends the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_run.runtime.checkpoints.rotation import scheduled_to_keep
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot


def next_to_drain(
    snapshots: Sequence[tuple[StagedSnapshot, StagingSlot]],
    *,
    done: Callable[[StagedSnapshot, StagingSlot], bool],
    newest_first: bool,
    overdue: bool,
) -> tuple[StagedSnapshot, StagingSlot] | None:
    """Return the snapshot to drain now, or None. Pure.

    Args:
        snapshots: complete snapshots, newest first.
        done: returns True for a snapshot that is on disk or need not be.
        newest_first: drain the newest snapshot first even if it is not scheduled, before a restart or at the
            end.
        overdue: the last checkpoint on disk is too old, so the newest snapshot is drained even if it is not
            scheduled.
    """
    pending = [entry for entry in snapshots if not done(*entry)]
    newest = pending[0] if pending and pending[0] == snapshots[0] else None
    if newest_first and newest is not None:
        return newest
    required = [entry for entry in pending if entry[0].must_reach_disk]
    if required:
        return required[-1]
    return newest if overdue else None


def within_limits(
    snapshots: Sequence[tuple[StagedSnapshot, StagingSlot]],
    *,
    broken: Callable[[StagedSnapshot, StagingSlot], bool],
) -> list[tuple[StagedSnapshot, StagingSlot]]:
    """Leave out what `save_total_limit` deletes once the newer ones are written, and what one of them
    replaces.

    For the end of a run. Pure.

    Args:
        snapshots: complete snapshots, newest first.
        broken: returns True for a snapshot that cannot be written; it does not count as a newer one.
    """
    found = []
    scheduled: dict[str, list[StagedSnapshot]] = {}
    places = set()
    for staged, slot in snapshots:
        if not broken(staged, slot):
            place = staged.output_dir, staged.step, None if staged.scheduled else staged.train_call_key
            if place in places:
                continue  # an attempt has taken the same step again
            places.add(place)
        newer = scheduled.setdefault(staged.output_dir, [])
        if staged.scheduled and not staged.kept and not broken(staged, slot):
            if newer and staged.folder != newer[0].best:
                keep = scheduled_to_keep(newer[0].limit, best=newer[0].best, newest=newer[0].folder)
                if keep is not None and len(newer) >= keep:
                    continue
            newer.append(staged)
        found.append((staged, slot))
    return found


class PublishedCheckpoints:
    """The newest checkpoint on disk of each `train()` call, and when each scheduled one was taken."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[int, float]] = {}
        self._scheduled: dict[tuple[int, int], float] = {}

    def record(self, call: int, step: int, *, taken_at: float, scheduled: bool = False) -> None:
        """Record a checkpoint on disk.

        Args:
            call: the ordinal of its `train()` call.
            step: its step.
            taken_at: when its state was the run's state, in seconds since the epoch. A snapshot taken later
                is newer even if its step is lower, because a run may resume from an earlier step.
            scheduled: the script has scheduled it.
        """
        if scheduled:
            self._scheduled[call, step] = max(taken_at, self._scheduled.get((call, step), taken_at))
        known = self._newest.get(call)
        if known is None or taken_at >= known[1]:
            self._newest[call] = step, taken_at

    def supersede(self, staged: StagedSnapshot) -> bool:
        """Return True for a recovery snapshot that is not newer than the checkpoint of its call."""
        if staged.must_reach_disk:
            return False
        step, taken_at = self._newest.get(staged.train_call.ordinal, (-1, 0.0))
        return staged.step <= step and staged.staged_at <= taken_at

    def repeat(self, staged: StagedSnapshot) -> bool:
        """Return True for a scheduled snapshot whose step was taken again since and is on disk."""
        key = staged.train_call.ordinal, staged.step
        return staged.scheduled and self._scheduled.get(key, 0.0) > staged.staged_at
