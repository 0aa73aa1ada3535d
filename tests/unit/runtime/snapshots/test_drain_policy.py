"""Which snapshot is drained next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.slots import snapshot

from grpo_run.runtime.snapshots._drain_policy import PublishedCheckpoints, next_to_drain, within_limits
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot

FLAGS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3)


def entries(
    *flags: tuple[bool, bool],
) -> tuple[list[tuple[StagedSnapshot, StagingSlot]], Callable[[StagedSnapshot, StagingSlot], bool]]:
    """Snapshots, newest first, from (scheduled, done) flags; and a function that returns done."""
    found = [
        (snapshot(Path("/out"), 100 - index, scheduled=scheduled), StagingSlot(index, Path(f"/slot{index}")))
        for index, (scheduled, _) in enumerate(flags)
    ]
    return found, lambda staged, slot: flags[slot.index][1]


@given(flags=FLAGS, newest_first=st.booleans(), old=st.booleans())
def test_a_done_snapshot_is_never_next(flags: list[tuple[bool, bool]], newest_first: bool, old: bool) -> None:
    """Property: scheduled snapshots come first, and of the others only the newest is drained."""
    snapshots, done = entries(*flags)
    due = next_to_drain(snapshots, done=done, newest_first=newest_first, overdue=old)
    wanted = [entry for entry in snapshots if entry[0].scheduled and not done(*entry)]
    if due is None:
        assert not wanted
        if newest_first or old:
            assert not snapshots or done(*snapshots[0])
        return
    assert not done(*due)
    if newest_first and not done(*snapshots[0]):
        assert due == snapshots[0]
    elif wanted:
        assert due == wanted[-1]
    else:
        assert due == snapshots[0]


def test_a_checkpoint_on_disk_supersedes_recovery_snapshots_up_to_its_step() -> None:
    """Not scheduled ones, later steps, other calls, or snapshots taken after it."""
    published = PublishedCheckpoints()
    out = Path("/out")
    recovery = {"scheduled": False, "staged_at": 1000.0}
    assert not published.supersede(snapshot(out, 5, **recovery))
    published.record(1, 6, taken_at=1000.0)
    published.record(1, 9, taken_at=500.0)  # an older state with a higher step
    assert published.supersede(snapshot(out, 5, **recovery))
    assert published.supersede(snapshot(out, 6, **recovery))
    assert not published.supersede(snapshot(out, 7, **recovery))
    assert not published.supersede(snapshot(out, 5, scheduled=True))
    assert not published.supersede(snapshot(out, 5, ordinal=2, **recovery))
    assert not published.supersede(snapshot(out, 5, scheduled=False, staged_at=1001.0))


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
