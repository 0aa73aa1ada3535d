"""Rank 0 reserves a slot for all ranks, and waits for the disk only for a scheduled checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from support.snapshots import FORBIDDEN, NO_MEMORY, NO_SLOT, TAKEN, SnapshotTrainer, Time, busy, steps, take
from support.vote_groups import ScriptedVotes

from grpo_run.runtime.rank.saving import _reservation as reservation
from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.rank.saving.contents import SaveMode
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.watchdog.causes import Cause

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def needed(snapshots: Snapshots, trainer: SnapshotTrainer) -> Snapshots:
    """Three scheduled checkpoints, none of them on disk: every slot is needed."""
    for step in (1, 2, 3):
        assert take(snapshots, trainer, step) == TAKEN
    return snapshots


def test_a_removed_staging_area_is_a_lack_of_memory(
    snapshots: Snapshots, trainer: SnapshotTrainer, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login manager may remove it during the run; the vote tells all ranks."""
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")

    def begin_snapshot(slot: Any) -> None:
        raise missing

    monkeypatch.setattr(type(snapshots.staging.slots[0]), "begin_snapshot", begin_snapshot)
    assert take(snapshots, trainer) == NO_MEMORY
    assert "no snapshot" in events()[-1]["text"]
    assert not any(busy(slot) for slot in snapshots.staging.slots)


@pytest.mark.parametrize(
    "flags", [SaveFlags(non_finite=True), SaveFlags(non_finite=False, mode=SaveMode.directly)]
)
def test_a_forbidden_snapshot_touches_no_slot(
    snapshots: Snapshots, trainer: SnapshotTrainer, session: Any, flags: SaveFlags
) -> None:
    """If rank 0 forbids it, no slot is emptied; one vote tells all ranks."""
    assert take(snapshots, trainer, 4) == TAKEN
    session.votes = ScriptedVotes()
    assert take(snapshots, trainer, 5, flags) == FORBIDDEN
    assert len(session.votes.sent) == 1
    assert steps(snapshots) == [4]


def test_a_snapshot_that_another_rank_forbids_is_not_taken(
    snapshots: Snapshots, trainer: SnapshotTrainer, session: Any
) -> None:
    """The slot that rank 0 had reserved is unlocked, and the newest snapshot stays."""
    assert take(snapshots, trainer, 4) == TAKEN
    session.votes = ScriptedVotes(lambda values: [1, *values[1:]])
    assert take(snapshots, trainer, 5) == FORBIDDEN
    assert steps(snapshots) == [4]
    assert not any(busy(slot) for slot in snapshots.staging.slots)


def test_a_forbidden_snapshot_discards_no_scheduled_checkpoint(
    needed: Snapshots, trainer: SnapshotTrainer, session: Any, clock: Time
) -> None:
    """While the disk is in trouble, a checkpoint in memory is discarded only after all ranks have voted."""
    needed.staging.set_trouble(Cause.disk_full)
    session.votes = ScriptedVotes(lambda values: [1, *values[1:]])
    assert take(needed, trainer, 4) == FORBIDDEN
    assert steps(needed) == [3, 2, 1]


def test_an_unscheduled_snapshot_does_not_wait(
    needed: Snapshots, trainer: SnapshotTrainer, clock: Time
) -> None:
    """It is skipped at once, and no slot is changed."""
    assert take(needed, trainer, 4, scheduled=False) == NO_SLOT
    assert clock.slept == 0
    assert steps(needed) == [3, 2, 1]


def test_a_scheduled_checkpoint_waits_for_the_disk(
    needed: Snapshots, trainer: SnapshotTrainer, clock: Time, session: Any
) -> None:
    """The watchdog sees that the rank waits on purpose; the wait is not part of the snapshot's cost."""
    clock.at = (5.0, needed.staging.slots[0].mark_drained)
    count, counted = session.slot.record_work, [0]
    session.slot.record_work = lambda: counted.__setitem__(0, counted[0] + 1) or count()
    assert take(needed, trainer, 4) == TAKEN
    assert steps(needed) == [4, 3, 2]
    assert clock.now == pytest.approx(105.0, abs=0.1)
    assert counted[0] >= clock.slept
    assert needed.cost_seconds < 1.0


def test_ranks_vote_while_rank_0_waits(
    needed: Snapshots, trainer: SnapshotTrainer, clock: Time, session: Any
) -> None:
    """Without it the vote of the other ranks would time out."""
    session.votes = ScriptedVotes()
    clock.at = (100.0, needed.staging.slots[0].mark_drained)
    assert take(needed, trainer, 4) == TAKEN
    waits = [values for values in session.votes.sent if values[-1] == reservation.WAITING]
    assert len(waits) == 100.0 // reservation.SLICE_SECONDS


def test_the_wait_for_a_slot_is_limited(
    needed: Snapshots, trainer: SnapshotTrainer, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is then written directly."""
    monkeypatch.setattr(reservation, "POLL_SECONDS", 10.0)
    assert take(needed, trainer, 4) == NO_SLOT
    assert reservation.WAIT_SECONDS <= clock.now - 100.0 <= reservation.WAIT_SECONDS + 20.0
    assert steps(needed) == [3, 2, 1]


def test_while_the_disk_is_in_trouble_the_oldest_snapshot_is_discarded(
    needed: Snapshots, trainer: SnapshotTrainer, clock: Time, events: Events
) -> None:
    """Training does not wait for a disk that is full or stuck, also if the trouble begins during the wait."""
    clock.at = (5.0, lambda: needed.staging.set_trouble(Cause.checkpoint_stall))
    assert take(needed, trainer, 4) == TAKEN
    lost = [(event["step"], event["cause"]) for event in events() if event["event"] == "checkpoint_failed"]
    assert lost == [(1, "checkpoint_stall")]
    assert clock.now == pytest.approx(105.0, abs=0.1)
    assert take(needed, trainer, 5) == TAKEN
    assert clock.now == pytest.approx(105.0, abs=0.1)
    assert steps(needed) == [5, 4, 3]
    assert take(needed, trainer, 6, scheduled=False) == TAKEN, (
        "a fault would lose all steps since the trouble"
    )
