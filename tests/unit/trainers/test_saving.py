"""A checkpoint is withdrawn before it is written, published after all ranks have written, and only then rotates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime import checkpoints
from grpo_run.runtime.checkpoints import TrainCall
from grpo_run.trainers import saving
from grpo_run.watchdog.observation import Phase, Slot

Events = Callable[[], list[dict[str, Any]]]


class Trainer:
    """Writes checkpoints as transformers' does: its files, then rotation by `save_total_limit`."""

    def __init__(self, output: Path) -> None:
        self.args = SimpleNamespace(
            output_dir=str(output), save_total_limit=None, save_only_model=False, should_save=True
        )
        self.state = SimpleNamespace(global_step=5, best_model_checkpoint=None)
        self.model_wrapped = object()
        self.seen: list[Any] = []
        self.during: Callable[[Path], None] = lambda path: None

    def _save_checkpoint(self, model: Any, trial: Any) -> str:
        """Write."""
        path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(b"weights of step %d" % self.state.global_step)
        self.seen.append((model, trial, self.args.save_total_limit))
        self.during(path)
        return "what the method returns"


@pytest.fixture
def call(tmp_path: Path) -> TrainCall:
    """The script's first call."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out"))


@pytest.fixture
def trainer(tmp_path: Path, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer whose checkpoint method is wrapped."""
    monkeypatch.setattr(saving, "_versions", lambda: {"torch": "2.13.0"})
    made = Trainer(tmp_path / "out")
    saving.wrap_save(made, session, call, lambda: None)
    return made


def save(trainer: Trainer, step: int) -> Path:
    """The trainer saves at `step`."""
    trainer.state.global_step = step
    trainer._save_checkpoint("model", None)
    return Path(trainer.args.output_dir) / f"checkpoint-{step}"


def test_a_saved_checkpoint_is_published(
    trainer: Trainer, call: TrainCall, events: Events, tmp_path: Path
) -> None:
    """With a manifest that holds, and a line in the journal."""
    path = save(trainer, 5)
    manifest = checkpoints.read_manifest(path)
    checkpoints.verify(path, manifest)
    assert (manifest.run_id, manifest.step, manifest.world_size, manifest.train_call) == ("run-1", 5, 1, call)
    (record,) = [record for record in events() if record["event"] == "checkpoint_published"]
    assert (record["step"], record["path"], record["verified"]) == (5, str(path.resolve()), True)
    assert record["size_bytes"] == len(b"weights of step 5")


def test_the_trainers_own_method_gets_and_returns_the_same(trainer: Trainer) -> None:
    """Nothing is looked into."""
    assert trainer._save_checkpoint("model", None) == "what the method returns"
    assert trainer.seen == [("model", None, None)]


def test_a_checkpoint_being_written_again_is_none(trainer: Trainer) -> None:
    """A kill in the middle must not leave an old manifest over new bytes."""
    path = save(trainer, 5)
    found: list[bool] = []
    trainer.during = lambda path: found.append((path / checkpoints.MANIFEST).exists())
    save(trainer, 5)
    assert found == [False]
    assert (path / checkpoints.MANIFEST).exists()


def test_a_save_that_failed_publishes_nothing(trainer: Trainer, events: Events) -> None:
    """The exception passes; the limit is what it was."""
    trainer.args.save_total_limit = 3

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    trainer.during = full
    with pytest.raises(OSError, match="No space"):
        save(trainer, 5)
    assert list(checkpoints.find(Path(trainer.args.output_dir))) == []
    assert [record for record in events() if record["event"] == "checkpoint_published"] == []
    assert trainer.args.save_total_limit == 3


def test_the_phase_is_closed_after_a_failed_save(trainer: Trainer, reading: Callable[[], Slot]) -> None:
    """A rank that goes on after it (some scripts do) is not in `checkpoint` for ever."""
    trainer.during = lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        save(trainer, 5)
    assert Phase.checkpoint not in [entry.phase for entry in reading().phases]


def test_old_checkpoints_go_only_when_the_new_one_is_complete(trainer: Trainer) -> None:
    """The trainer itself is not let to rotate; afterwards the limit holds."""
    first = save(trainer, 5)
    trainer.args.save_total_limit = 1
    there: list[bool] = []
    trainer.during = lambda path: there.append(first.exists())
    second = save(trainer, 10)
    assert there == [True]
    assert trainer.seen[-1][2] is None
    assert not first.exists()
    assert checkpoints.read_manifest(second).step == 10


def test_the_vote_under_way_is_read_before_saving(
    tmp_path: Path, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks save after agreeing; and the group is free for the barrier after it."""
    monkeypatch.setattr(saving, "_versions", dict)
    order: list[str] = []
    trainer = Trainer(tmp_path / "out")
    trainer.during = lambda path: order.append("write")
    saving.wrap_save(trainer, session, call, lambda: order.append("agree"))
    save(trainer, 5)
    assert order == ["agree", "write"]


def test_nothing_is_published_before_all_ranks_have_written(
    trainer: Trainer, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest comes after the barrier."""
    path = Path(trainer.args.output_dir) / "checkpoint-5"
    at_barrier: list[tuple[bool, bool]] = []

    def maximum(value: int) -> int:
        at_barrier.append(((path / "model.safetensors").exists(), (path / checkpoints.MANIFEST).exists()))
        return value

    monkeypatch.setattr(session.votes, "maximum", maximum)
    save(trainer, 5)
    assert at_barrier[0] == (True, False)


def test_only_the_main_rank_publishes(trainer: Trainer, session: Any, events: Events) -> None:
    """The others have written their part."""
    session.is_main = False
    path = save(trainer, 5)
    assert not (path / checkpoints.MANIFEST).exists()
    assert events() == []


def test_saving_is_shown(trainer: Trainer, session: Any, reading: Callable[[], Slot]) -> None:
    """The phase while it lasts, the step and the time afterwards."""
    during: list[Phase | None] = []
    trainer.during = lambda path: during.append(reading().phase)
    save(trainer, 5)
    session.slot.touch()
    assert during == [Phase.checkpoint]
    assert reading().checkpoint_step == 5
    assert reading().phases == ()


def test_a_checkpoint_is_whole_although_the_script_wants_the_model_only(trainer: Trainer) -> None:
    """`save_only_model` is off while the method runs, and as the script had it afterwards."""
    trainer.args.save_only_model = True
    during: list[bool] = []
    trainer.during = lambda path: during.append(trainer.args.save_only_model)
    save(trainer, 5)
    assert during == [False]
    assert trainer.args.save_only_model is True


def test_the_end_of_a_call_is_saved_when_the_schedule_did_not(
    trainer: Trainer, session: Any, call: TrainCall
) -> None:
    """Once; a checkpoint that is there already is left as it is."""
    trainer.state.global_step = 7
    path = saving.ensure_saved(trainer, session, call)
    assert checkpoints.read_manifest(path).step == 7
    assert trainer.seen == [(trainer.model_wrapped, None, None)]
    saving.ensure_saved(trainer, session, call)
    assert len(trainer.seen) == 1
