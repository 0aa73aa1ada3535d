"""Which snapshot is drained next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.slots import snapshot

from grpo_run.runtime.snapshots._drain_policy import within_limits
from grpo_run.runtime.snapshots.slot import StagingSlot


def test_what_the_limit_would_delete_at_once_is_not_written_at_the_end() -> None:
    """The best checkpoint, those that the user asked for, and other snapshots are; a broken one does not
    count.
    """

    def steps(limit: int | None, *, broken: int = 0, **newest: Any) -> list[int]:
        changes: list[dict[str, Any]] = [newest, {}, {"scheduled": False}, {"kept": True}, {}, {}]
        found = [
            (
                snapshot(Path("/out"), 9 - index, limit=limit, **each),
                StagingSlot(index, Path(f"/slot{index}")),
            )
            for index, each in enumerate(changes)
        ]
        return [
            staged.step for staged, _ in within_limits(found, broken=lambda staged, _: staged.step == broken)
        ]

    assert steps(None) == steps(0) == [9, 8, 7, 6, 5, 4]
    assert steps(1) == [9, 7, 6]
    assert steps(2) == [9, 8, 7, 6]
    assert steps(1, broken=9) == [9, 8, 7, 6]
    assert steps(1, best="checkpoint-4") == [9, 8, 7, 6, 4]


def test_a_step_that_was_taken_again_is_written_once_at_the_end() -> None:
    """The newer snapshot, unless it is broken."""
    found = [(snapshot(Path("/out"), 9), StagingSlot(index, Path(f"/slot{index}"))) for index in range(2)]
    assert within_limits(found, broken=lambda staged, slot: False) == found[:1]
    assert within_limits(found, broken=lambda staged, slot: slot.index == 0) == found
