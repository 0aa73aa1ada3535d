"""A snapshot contains what the trainer would have written, and is complete on all ranks or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from support.slots import snapshot
from support.snapshots import NO_MEMORY, TAKEN, SnapshotTrainer, Time, busy, steps, take
from support.vote_groups import ScriptedVotes
from torch.distributed.checkpoint import CheckpointException

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving import snapshots as snapshots_module
from grpo_run.runtime.rank.saving.snapshots import Durability, Snapshots
from grpo_run.runtime.snapshots._drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.slot import PREPARED
from grpo_run.watchdog.causes import Cause

Events = Callable[[], list[dict[str, Any]]]


def test_a_drained_snapshot_has_the_bytes_that_the_trainer_would_have_written(
    snapshots: Snapshots, trainer: SnapshotTrainer, out: Path, tmp_path: Path
) -> None:
    """Torch's archives have no checksums and another name inside; everything else is equal."""
    assert take(snapshots, trainer) == TAKEN
    slot, staged = snapshots.last or (None, None)
    assert slot is not None
    assert staged is not None
    assert staged == slot.read_snapshot()
    assert staged.model_copy(update={"files": None}) == snapshot(out, 5)
    assert list(staged.files or {}) == ["model.safetensors", "optimizer.pt", "trainer_state.json"]
    trainer.weights = torch.zeros(1000)  # training continues
    assert isinstance(
        handle_request(snapshots.staging, DrainRequest(slot=slot.index), lambda written: None), DrainPublished
    )
    direct = SnapshotTrainer(tmp_path / "direct")
    (direct.output / "checkpoint-5").mkdir(parents=True)
    direct.write(direct.output / "checkpoint-5")
    for name in ("model.safetensors", "trainer_state.json"):
        drained, expected = out / "checkpoint-5" / name, direct.output / "checkpoint-5" / name
        assert drained.read_bytes() == expected.read_bytes()
    assert torch.equal(torch.load(out / "checkpoint-5/optimizer.pt")["step"], torch.arange(1000.0))


def test_memory_is_allocated_before_the_first_snapshot(
    snapshots: Snapshots, trainer: SnapshotTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the slots of the first two; what is not used is freed with the snapshot."""
    monkeypatch.setattr(snapshots_module, "MINIMUM_PREPARED_BYTES", 1)
    snapshots.prepare({"optimizer.pt": 8192, "other.pt": 8192})
    assert take(snapshots, trainer, 1) == TAKEN
    first, second, third = snapshots.staging.slots
    assert not first.spare.exists()
    assert sorted(os.listdir(second.spare)) == ["optimizer.pt", "other.pt"]
    assert not third.spare.exists()
    prepared = (second.spare / "optimizer.pt").stat().st_ino
    assert take(snapshots, trainer, 2) == TAKEN
    assert (second.files / "checkpoint-2/optimizer.pt").stat().st_ino == prepared


def test_the_slot_is_locked_while_it_is_written(
    snapshots: Snapshots, trainer: SnapshotTrainer, clock: Time
) -> None:
    """Until the copy is complete, the slot contains no snapshot; afterwards it is unlocked. The cost is the
    time for which training was blocked on this rank.
    """
    slot = snapshots.staging.slots[0]
    during: list[tuple[bool, Any]] = []

    def copy() -> None:
        during.append((busy(slot), slot.read_snapshot()))
        clock.sleep(0.25)

    trainer.during = copy
    take(snapshots, trainer)
    assert during == [(True, None)]
    assert snapshots.cost_seconds == pytest.approx(0.25)
    assert not busy(slot)


# ---- lack of memory ----


@pytest.mark.parametrize(
    "error",
    [
        NoHeadroomError("the buffer needs 4 MiB more"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        CheckpointException("write", {1: (OSError(errno.ENOSPC, "No space left"), StackSummary())}),
    ],
)
def test_without_memory_there_is_no_snapshot(
    snapshots: Snapshots, trainer: SnapshotTrainer, events: Events, error: BaseException
) -> None:
    """The journal names the error, the earlier snapshot stays, and the slot can be used again."""
    take(snapshots, trainer, 4)

    def fail() -> None:
        raise error

    trainer.during = fail
    assert take(snapshots, trainer, 5) == NO_MEMORY
    assert steps(snapshots) == [4]
    assert [record["text"] for record in events() if record["event"] == "warning"] == [str(error)]
    assert not any(busy(slot) for slot in snapshots.staging.slots)
    trainer.during = lambda: None
    assert take(snapshots, trainer, 6) == TAKEN


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        CheckpointException("write", {0: (PermissionError(errno.EACCES, "no"), StackSummary())}),
        SystemExit(1),
    ],
)
def test_another_error_is_raised(
    snapshots: Snapshots, trainer: SnapshotTrainer, error: BaseException
) -> None:
    """The incomplete copy is no snapshot, the earlier one stays, and the slot is unlocked."""
    take(snapshots, trainer, 4)

    def fail() -> None:
        raise error

    trainer.during = fail
    with pytest.raises(type(error)):
        take(snapshots, trainer, 5)
    assert steps(snapshots) == [4]
    assert not any(busy(slot) for slot in snapshots.staging.slots)


def test_a_snapshot_that_cannot_be_declared_is_reported_as_lost(
    snapshots: Snapshots, trainer: SnapshotTrainer, session: Any
) -> None:
    """The staging area was removed after the copy; the ranks have already agreed, so the run continues."""
    assert take(snapshots, trainer, 4) == TAKEN
    slot = snapshots.staging.slots[1]

    def answer(values: list[int]) -> list[int]:
        if len(values) == 2:
            (slot.path / PREPARED).unlink(missing_ok=True)
        return values

    session.votes = ScriptedVotes(answer)
    assert take(snapshots, trainer, 5) == TAKEN
    assert steps(snapshots) == [4]
    assert snapshots.last is None
    assert "the snapshot of step 5 is lost" in session.notified[-1]
    assert not snapshots.wait_durable()


# ---- waiting until the snapshot is durable ----


@pytest.mark.parametrize(
    ("event", "limit_seconds", "durable", "ends"),
    [
        ("drained", 60.0, True, 3.0),
        ("trouble", 60.0, False, 3.0),
        ("freed", 60.0, False, 3.0),
        ("", 2.0, False, 2.0),
    ],
)
def test_a_wait_ends_when_the_snapshot_is_on_disk_or_will_not_be(
    snapshots: Snapshots,
    trainer: SnapshotTrainer,
    clock: Time,
    event: str,
    limit_seconds: float,
    durable: bool,
    ends: float,
) -> None:
    """When its slot is marked as drained, when the disk is in trouble, when it was freed because it cannot be
    read, or after a limit: the supervisor keeps trying, and the script continues.
    """
    take(snapshots, trainer)
    assert snapshots.last is not None
    if event == "drained":
        clock.at = (3.0, snapshots.last[0].mark_drained)
    elif event == "freed":
        clock.at = (3.0, snapshots.last[0].free)
    elif event:
        clock.at = (3.0, lambda: snapshots.staging.set_trouble(Cause.checkpoint_stall))
    assert snapshots.wait_durable(limit_seconds) is durable
    assert clock.now == pytest.approx(100.0 + ends, abs=0.1)


def test_a_snapshot_whose_slot_is_used_again_is_durable(
    snapshots: Snapshots, trainer: SnapshotTrainer, clock: Time
) -> None:
    """A slot is used again only after its snapshot was drained."""
    take(snapshots, trainer)
    assert snapshots.last is not None
    slot, _ = snapshots.last
    slot.begin_snapshot()
    slot.prepare_snapshot(snapshot(trainer.output, 6))
    slot.complete_snapshot()
    assert snapshots.wait_durable()


def test_other_ranks_wait_for_rank_0(snapshots: Snapshots, session: Any, clock: Time) -> None:
    """Only rank 0 polls the slot."""
    session.is_main = False
    for result in (Durability.given_up, Durability.durable):
        answers = iter([Durability.waiting, result])
        session.votes = ScriptedVotes(lambda values, answers=answers: [next(answers)])  # type: ignore[misc]
        assert snapshots.wait_durable() is (result == Durability.durable)
    assert clock.slept == 0
