"""A rank's copy of a checkpoint in memory: agreed on, complete or not there, and training goes on."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from support.slots import snapshot
from torch.distributed.checkpoint import CheckpointException

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.drain import handle_request
from grpo_run.runtime.staging.drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.staging.slot import StagingSlot
from grpo_run.trainers.saving import snapshots as module
from grpo_run.trainers.saving.snapshots import NO_ROOM, NO_SLOT, TAKEN, Snapshots, finite

Events = Callable[[], list[dict[str, Any]]]


class Trainer:
    """Writes its parts below what it takes for its output directory."""

    def __init__(self, output: Path, weights: torch.Tensor | None = None) -> None:
        self.output = output
        self.weights = torch.arange(1000.0) if weights is None else weights
        self.during: Callable[[], None] = lambda: None

    def _get_output_dir(self, trial: Any = None) -> str:
        """As transformers'."""
        return str(self.output)

    def write(self, folder: Path) -> None:
        """A model, an optimizer's state and the trainer's own."""
        assert folder.parent == Path(self._get_output_dir())
        safetensors.torch.save_file({"weight": self.weights}, folder / "model.safetensors")
        torch.save({"step": self.weights}, folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text("{}")
        self.during()


class Time:
    """A clock that moves when somebody sleeps; `at` says what happens after so many seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0
        self.at: tuple[float, Callable[[], None]] | None = None
        self.monotonic = self.perf_counter = lambda: self.now

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        self.now += seconds
        self.slept += 1
        if self.at is not None and self.now - 100.0 >= self.at[0]:
            (_, do), self.at = self.at, None
            do()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Nobody really waits."""
    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The script's output directory."""
    return tmp_path / "out"


@pytest.fixture
def snapshots(session: Any, tmp_path: Path) -> Any:
    """A rank's snapshots, in an empty staging."""
    made = Snapshots(session, StagingArea(tmp_path / "memory"))
    yield made
    made.close()


@pytest.fixture
def trainer(out: Path) -> Trainer:
    """A trainer."""
    return Trainer(out)


def take(snapshots: Snapshots, trainer: Trainer, step: int = 5, **changes: Any) -> int:
    """Take one of `step`."""
    return snapshots.take(trainer, snapshot(trainer.output, step, **changes), trainer.write)


def steps(snapshots: Snapshots) -> list[int]:
    """What is in memory, newest first."""
    return [staged.step for staged, _ in snapshots.staging.snapshots()]


def busy(slot: StagingSlot) -> bool:
    """Whether somebody holds the slot, asked through a descriptor of our own."""
    descriptor = os.open(slot.path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# ---- taking one ----


def test_what_was_taken_becomes_what_the_trainer_would_have_written(
    snapshots: Snapshots, trainer: Trainer, out: Path, tmp_path: Path
) -> None:
    """Byte for byte, through the drainer; and only the trainer's own small files lie in the slot."""
    assert take(snapshots, trainer) == TAKEN
    slot, staged = snapshots.last or (None, None)
    assert slot is not None
    assert staged == slot.read_snapshot() == snapshot(out, 5)
    assert os.listdir(slot.files / "checkpoint-5") == ["trainer_state.json"]
    trainer.weights = torch.zeros(1000)  # training goes on
    assert isinstance(
        handle_request(snapshots.staging, DrainRequest(slot=slot.index), lambda n: None), DrainPublished
    )
    direct = Trainer(tmp_path / "direct")
    (direct.output / "checkpoint-5").mkdir(parents=True)
    direct.write(direct.output / "checkpoint-5")
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        assert (out / "checkpoint-5" / name).read_bytes() == (
            direct.output / "checkpoint-5" / name
        ).read_bytes()


def test_the_trainers_directory_is_its_own_again(snapshots: Snapshots, trainer: Trainer, out: Path) -> None:
    """Also when the script had replaced the method on the trainer itself, and after a failure."""
    take(snapshots, trainer)
    assert vars(trainer).keys() == {"output", "weights", "during"}
    own: Any = lambda trial=None: "mine"
    trainer._get_output_dir = own  # type: ignore[method-assign]
    take(snapshots, trainer)
    assert trainer._get_output_dir is own

    def fail() -> None:
        raise ValueError("a reward function's state")

    trainer.during = fail
    with pytest.raises(ValueError, match="state"):
        take(snapshots, trainer)
    assert trainer._get_output_dir is own


def test_the_cost_is_what_it_blocked_for(snapshots: Snapshots, trainer: Trainer, clock: Time) -> None:
    """Measured on this rank."""
    trainer.during = lambda: clock.sleep(0.25)
    take(snapshots, trainer)
    assert snapshots.cost_seconds == pytest.approx(0.25)


def test_memory_is_used_again(snapshots: Snapshots, trainer: Trainer) -> None:
    """Two slots are enough for one snapshot after the other; the same files serve, however often."""
    kept = set()
    for step in range(1, 8):
        assert take(snapshots, trainer, step, scheduled=False) == TAKEN
        for slot in snapshots.staging.slots:
            if slot.buffer_path(0).exists():
                kept.add((slot.index, slot.buffer_path(0).stat().st_ino))
    assert [index for index, _ in sorted(kept)] == [0, 1]
    assert steps(snapshots) == [7, 6]


def test_the_slot_is_held_while_it_is_written(snapshots: Snapshots, trainer: Trainer) -> None:
    """And let go afterwards; until then it is no snapshot."""
    slot = snapshots.staging.slots[0]
    during: list[tuple[bool, Any]] = []
    trainer.during = lambda: during.append((busy(slot), slot.read_snapshot()))
    take(snapshots, trainer)
    assert during == [(True, None)]
    assert not busy(slot)


def test_ranks_write_after_the_slot_is_empty_and_it_is_complete_after_all_have(
    snapshots: Snapshots, trainer: Trainer, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agreement before and after the writing."""
    slot = snapshots.staging.slots[0]
    slot.begin_snapshot()
    (slot.files / "old").write_bytes(b"old")
    order: list[Any] = []

    def maximum(value: int) -> int:
        order.append(
            (sorted(os.listdir(slot.files)), slot.index_path(0).exists(), slot.read_snapshot() is not None)
        )
        return value

    monkeypatch.setattr(session.votes, "maximum", maximum)
    trainer.during = lambda: order.append("written")
    take(snapshots, trainer)
    assert order == [
        (["old"], False, False),
        (["checkpoint-5"], False, False),
        "written",
        (["checkpoint-5"], True, False),
        (["checkpoint-5"], True, True),
    ]
    assert slot.read_snapshot() is not None


def test_only_rank_0_chooses_empties_and_declares(
    snapshots: Snapshots, trainer: Trainer, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others take what it has chosen, and hold no lock."""
    session.is_main = False
    slot = snapshots.staging.slots[2]
    (slot.files / "checkpoint-5").mkdir(parents=True)
    answers = iter([module.FOUND + 2, TAKEN, TAKEN, TAKEN])
    monkeypatch.setattr(session.votes, "maximum", lambda value: next(answers))
    held: list[bool] = []
    trainer.during = lambda: held.append(busy(slot))
    assert take(snapshots, trainer) == TAKEN
    assert slot.index_path(0).exists()
    assert slot.read_snapshot() is None
    assert held == [False]
    assert snapshots.last is None


# ---- when there is no room ----


def test_memory_that_was_taken_away_is_no_room(
    snapshots: Snapshots, trainer: Trainer, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login manager may clean it up while the run goes on: nobody is left waiting, and the journal says why."""
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory")

    def withdraw(slot: Any) -> None:
        raise gone

    monkeypatch.setattr(type(snapshots.staging.slots[0]), "begin_snapshot", withdraw)
    assert take(snapshots, trainer) == NO_ROOM
    assert "no snapshot" in events()[-1]["text"]


@pytest.mark.parametrize(
    "error",
    [
        NoHeadroomError("the arena needs 4 MiB more"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        CheckpointException("write", {1: (OSError(errno.ENOSPC, "No space left"), StackSummary())}),
    ],
)
def test_without_room_there_is_no_snapshot(
    snapshots: Snapshots, trainer: Trainer, events: Events, error: BaseException
) -> None:
    """Whether the arena has none, or what goes past it, on any rank of a sharded save; the journal says why, the slot is free again."""
    take(snapshots, trainer, 4)

    def fail() -> None:
        raise error

    trainer.during = fail
    assert take(snapshots, trainer, 5) == NO_ROOM
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
def test_another_error_is_the_scripts(snapshots: Snapshots, trainer: Trainer, error: BaseException) -> None:
    """It passes; what was being written is no snapshot, and the older one is still there."""
    take(snapshots, trainer, 4)

    def fail() -> None:
        raise error

    trainer.during = fail
    with pytest.raises(type(error)):
        take(snapshots, trainer, 5)
    assert steps(snapshots) == [4]
    assert not any(busy(slot) for slot in snapshots.staging.slots)


def test_when_another_rank_has_no_room_there_is_no_snapshot(
    snapshots: Snapshots, trainer: Trainer, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks' parts or none."""
    values: list[int] = []

    def maximum(value: int) -> int:
        values.append(value)
        return NO_ROOM if len(values) == 3 else value

    monkeypatch.setattr(session.votes, "maximum", maximum)
    assert take(snapshots, trainer) == NO_ROOM
    assert values[2] == TAKEN
    assert steps(snapshots) == []
    assert snapshots.last is None


def test_an_arena_that_cannot_be_had_is_no_room(
    snapshots: Snapshots, trainer: Trainer, tmp_path: Path
) -> None:
    """Something else has its name."""
    (snapshots.staging.slots[0].buffer_path(0)).symlink_to(tmp_path / "elsewhere")
    assert take(snapshots, trainer) == NO_ROOM


# ---- when all slots are needed ----


@pytest.fixture
def needed(snapshots: Snapshots, trainer: Trainer) -> Snapshots:
    """Three checkpoints that the script asked for, none of them on disk."""
    for step in (1, 2, 3):
        assert take(snapshots, trainer, step) == TAKEN
    return snapshots


def test_a_snapshot_of_ours_does_without(needed: Snapshots, trainer: Trainer, clock: Time) -> None:
    """At once, and nothing is touched."""
    assert take(needed, trainer, 4, scheduled=False) == NO_SLOT
    assert clock.slept == 0
    assert steps(needed) == [3, 2, 1]


def test_a_checkpoint_of_the_scripts_waits_for_the_disk(
    needed: Snapshots, trainer: Trainer, clock: Time, session: Any
) -> None:
    """While it does take them; the watchdog sees that the rank waits and is alive."""
    clock.at = (5.0, needed.staging.slots[0].mark_drained)
    count, counted = session.slot.record_work, [0]
    session.slot.record_work = lambda: counted.__setitem__(0, counted[0] + 1) or count()
    assert take(needed, trainer, 4) == TAKEN
    assert steps(needed) == [4, 3, 2]
    assert clock.now == pytest.approx(105.0, abs=0.1)
    assert counted[0] >= clock.slept
    assert needed.cost_seconds < 1.0, "waiting for the disk is not what a snapshot costs"


def test_waiting_for_the_disk_has_an_end(
    needed: Snapshots, trainer: Trainer, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is then written directly."""
    monkeypatch.setattr(module, "POLL_SECONDS", 10.0)
    assert take(needed, trainer, 4) == NO_SLOT
    assert module.WAIT_SECONDS <= clock.now - 100.0 <= module.WAIT_SECONDS + 20.0
    assert steps(needed) == [3, 2, 1]


def test_when_the_disk_is_in_trouble_the_oldest_goes(
    needed: Snapshots, trainer: Trainer, clock: Time
) -> None:
    """Training never waits for a disk that takes nothing; also when the trouble comes while it waits."""
    clock.at = (5.0, lambda: needed.staging.set_trouble("the disk is full"))
    assert take(needed, trainer, 4) == TAKEN
    assert clock.now == pytest.approx(105.0, abs=0.1)
    assert take(needed, trainer, 5) == TAKEN
    assert clock.now == pytest.approx(105.0, abs=0.1)
    assert steps(needed) == [5, 4, 3]
    assert take(needed, trainer, 6, scheduled=False) == TAKEN, "or a fault would cost all the steps since"


# ---- waiting until it is durable ----


def test_what_is_on_disk_is_durable(snapshots: Snapshots, trainer: Trainer, clock: Time) -> None:
    """As soon as the drainer says so."""
    take(snapshots, trainer)
    assert snapshots.last is not None
    clock.at = (3.0, snapshots.last[0].mark_drained)
    assert snapshots.wait_durable()
    assert clock.now == pytest.approx(103.0, abs=0.1)


def test_what_was_drained_and_given_away_is_durable(
    snapshots: Snapshots, trainer: Trainer, clock: Time
) -> None:
    """A slot is given to another only after that."""
    take(snapshots, trainer)
    assert snapshots.last is not None
    slot, _ = snapshots.last
    slot.begin_snapshot()
    slot.complete_snapshot(snapshot(trainer.output, 6))
    assert snapshots.wait_durable()


def test_trouble_ends_the_waiting(snapshots: Snapshots, trainer: Trainer, clock: Time) -> None:
    """The supervisor goes on trying; the script need not stand still."""
    take(snapshots, trainer)
    clock.at = (3.0, lambda: snapshots.staging.set_trouble("the disk hangs"))
    assert not snapshots.wait_durable()
    assert clock.now == pytest.approx(103.0, abs=0.1)


def test_waiting_has_an_end(snapshots: Snapshots, trainer: Trainer, clock: Time) -> None:
    """Whatever the disk does."""
    take(snapshots, trainer)
    assert not snapshots.wait_durable(2.0)
    assert clock.now == pytest.approx(102.0, abs=0.1)


def test_the_others_wait_for_rank_0(
    snapshots: Snapshots, session: Any, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone looks."""
    session.is_main = False
    for said in (module.GAVE_UP, module.FOUND):
        answers = iter([module.WAITING, said])
        monkeypatch.setattr(session.votes, "maximum", lambda value, answers=answers: next(answers))
        assert snapshots.wait_durable() is (said == module.FOUND)
    assert clock.slept == 0


# ---- numbers ----


def model(*tensors: torch.Tensor) -> Any:
    """A trainer of a model with these parameters."""
    trained = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
    made = SimpleNamespace(parameters=lambda: iter(trained))
    return SimpleNamespace(model=made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_weight_that_is_no_number_is_found(dtype: torch.dtype, value: float) -> None:
    """Wherever it is, of whatever type."""
    bad = torch.ones(1000, dtype=dtype)
    bad[617] = value
    good = torch.ones(10)
    assert not finite(model(good, bad, good))
    assert not finite(model(bad))


def test_large_weights_are_numbers() -> None:
    """No sum of theirs overflows."""
    assert finite(model(torch.full((4096,), 65504.0, dtype=torch.float16)))
    assert finite(model(torch.full((10,), 3e38), torch.full((10,), -3e38)))


def test_what_has_no_weights_has_no_bad_ones() -> None:
    """A model whose parameters are elsewhere, whole numbers, masks."""
    assert finite(model())
    assert finite(model(torch.empty(0), torch.tensor([1, 2]), torch.tensor([True])))


def test_this_ranks_part_is_looked_at() -> None:
    """Under ZeRO-3 the parameter itself is empty."""
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.tensor([1.0, float("nan")])
    assert not finite(model(parameter))


def test_looking_leaves_no_trace_in_the_graph() -> None:
    """Weights are trained on."""
    parameter = torch.nn.Parameter(torch.ones(10))
    assert finite(model(parameter))
    assert parameter.grad is None
