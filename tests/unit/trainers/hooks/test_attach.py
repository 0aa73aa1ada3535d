"""The guard outside a run, and how ranks agree on what to resume from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.identities import identity

import grpo_run.trainers
from grpo_run.runtime.checkpoints import manifest
from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.errors import ConfigError, Stopped
from grpo_run.trainers.hooks import attach

Events = Callable[[], list[dict[str, Any]]]


def test_outside_a_run_guarding_changes_nothing() -> None:
    """A script may call it always."""
    trainer = SimpleNamespace()
    assert grpo_run.trainers.guard(trainer) is trainer
    assert vars(trainer) == {}


def test_outside_a_run_train_is_the_original() -> None:
    """The hook calls through with whatever it was given."""
    calls: list[Any] = []

    class Trainer:
        """As transformers' module has it."""

        def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> str:
            """Train."""
            calls.append((resume_from_checkpoint, trial, kwargs))
            return "output"

    module: Any = ModuleType("transformers.trainer")
    module.Trainer = Trainer
    attach._patch_trainer(module)
    assert Trainer().train(True, ignore_keys_for_eval=["x"]) == "output"
    assert calls == [(True, None, {"ignore_keys_for_eval": ["x"]})]


def test_hooking_twice_hooks_once() -> None:
    """Two notifications of the same import must not guard twice."""

    class Trainer:
        """As transformers' module has it."""

        def train(self) -> None:
            """Train."""

    module: Any = ModuleType("transformers.trainer")
    module.Trainer = Trainer
    attach._patch_trainer(module)
    once = Trainer.train
    attach._patch_trainer(module)
    assert Trainer.train is once


def test_what_is_no_trainer_is_refused(session: Any) -> None:
    """With what it lacks; unless one goes on with untested things."""
    with pytest.raises(ConfigError, match="lacks _save_checkpoint"):
        attach._check(session, SimpleNamespace(args=SimpleNamespace()))
    session.config = replace(session.config, allow_untested=True)
    attach._check(session, SimpleNamespace(args=SimpleNamespace()))


@pytest.fixture
def call(tmp_path: Path) -> TrainCall:
    """The script's first call."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out"))


def publish(call: TrainCall, step: int, *, run_id: str = "run-1", finished: bool = False) -> Path:
    """A complete checkpoint."""
    path = Path(call.output_dir) / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    manifest.write_manifest(path, identity(step=step, run_id=run_id, train_call=call))
    if finished:
        manifest.mark_finished(path)
    return path


def test_the_choice_is_said(session: Any, call: TrainCall) -> None:
    """From which checkpoint the call goes on."""
    path = publish(call, 5)
    assert attach._agree_on_resume(session, call, None).argument == str(path)
    assert session.said == [f"train() call 1 (GRPOTrainer) goes on from {path}"]


def test_a_rejected_checkpoint_is_written_and_said(session: Any, call: TrainCall, events: Events) -> None:
    """With its path and the reason."""
    path = publish(call, 5)
    (path / "model.safetensors").write_bytes(b"weightz")
    assert attach._agree_on_resume(session, call, None).argument is None
    (record,) = events()
    assert (record["event"], record["step"], record["path"]) == ("checkpoint_rejected", 5, str(path))
    assert "model.safetensors" in record["reason"]
    assert record["cause"] == "checkpoint_corrupt"
    assert record["moved_to"] == str(path.with_name("rejected-checkpoint-5"))
    assert "is not used" in session.said[0]


def test_a_finished_call_is_written_as_restored(session: Any, call: TrainCall, events: Events) -> None:
    """It will not be trained."""
    publish(call, 20, finished=True)
    assert attach._agree_on_resume(session, call, None).finished
    assert [(record["event"], record["step"]) for record in events()] == [("train_restored", 20)]


def test_another_runs_checkpoints_are_warned_of(session: Any, call: TrainCall, events: Events) -> None:
    """In the journal and for the person."""
    publish(call, 5, run_id="run-0")
    assert attach._agree_on_resume(session, call, None).argument is None
    assert [record["event"] for record in events()] == ["warning"]
    assert "run-0" in session.said[0]


def test_a_stop_asked_before_the_call_is_obeyed(session: Any, call: TrainCall) -> None:
    """Before the model is moved and a rollout begun."""
    session.board.request_stop()
    with pytest.raises(Stopped):
        attach._agree_on_resume(session, call, None)


def test_wrappers_of_an_instance_come_off() -> None:
    """A second `train()` call of the same trainer wraps afresh."""

    class Trainer:
        """With one method of each kind."""

        def _generate(self) -> None:
            """Generate."""

    trainer: Any = Trainer()
    trainer._generate = lambda: None
    trainer.training_step = lambda: None
    trainer.own = 1
    before = trainer.training_step
    attach._unwrap(trainer, {"training_step": before})
    assert vars(trainer) == {"own": 1, "training_step": before}


def test_restoring_takes_no_step() -> None:
    """The pass over the data ends at once, and comes back afterwards."""

    class Trainer:
        """One epoch at a time."""

        control = SimpleNamespace(should_training_stop=False)

        def _run_epoch(self) -> str:
            """Run."""
            return "trained"

    trainer = Trainer()
    undo = attach._restore_only(trainer)
    assert trainer._run_epoch() is None
    assert trainer.control.should_training_stop
    undo()
    assert trainer._run_epoch() == "trained"
