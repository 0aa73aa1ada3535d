"""What a `train()` call resumes from is agreed on, reported and journaled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.identities import identity

from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished, write_manifest
from grpo_run.runtime.errors import Stopped
from grpo_run.trainers.hooks.resume import RestoredCall, agree_on_resume, skip_training

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def call(tmp_path: Path) -> TrainCall:
    """The script's first call."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out"))


def publish(call: TrainCall, step: int, *, run_id: str = "run-1", finished: bool = False) -> Path:
    """Write a complete checkpoint."""
    path = Path(call.output_dir) / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    write_manifest(path, identity(step=step, run_id=run_id, train_call=call))
    if finished:
        mark_finished(path)
    return path


def test_the_chosen_checkpoint_is_reported(session: Any, call: TrainCall) -> None:
    """The message has the call and the checkpoint's path."""
    path = publish(call, 5)
    assert agree_on_resume(session, call, None).choice.argument == str(path)
    assert session.notified == [f"train() call 1 (GRPOTrainer) resumes from {path}"]


def test_a_rejected_checkpoint_is_reported_and_journaled(
    session: Any, call: TrainCall, events: Events
) -> None:
    """The message has its path and the reason."""
    path = publish(call, 5)
    (path / "model.safetensors").write_bytes(b"weightz")
    assert agree_on_resume(session, call, None).choice.argument is None
    record, chosen = events()
    assert (chosen["event"], chosen["step"], chosen["path"]) == ("resume_chosen", 0, None)
    assert (record["event"], record["step"], record["path"]) == ("checkpoint_rejected", 5, str(path))
    assert "model.safetensors" in record["reason"]
    assert record["cause"] == "checkpoint_corrupt"
    assert record["moved_to"] == str(path.with_name("rejected-checkpoint-5"))
    assert "is not used" in session.notified[0]


def test_a_finished_call_is_journaled_as_restored(session: Any, call: TrainCall, events: Events) -> None:
    """It is not trained again."""
    path = publish(call, 20, finished=True)
    assert agree_on_resume(session, call, None).choice.finished
    assert [(record["event"], record["step"]) for record in events()] == [
        ("resume_chosen", 20),
        ("train_restored", 20),
    ]
    assert session.notified == [f"train() call 1 (GRPOTrainer) is already finished; restored from {path}"]


def test_checkpoints_of_another_run_are_warned_of(session: Any, call: TrainCall, events: Events) -> None:
    """The warning is journaled and printed."""
    publish(call, 5, run_id="run-0", finished=True)
    assert agree_on_resume(session, call, None).choice.argument is None
    assert [record["event"] for record in events()] == ["warning", "resume_chosen"]
    assert "run-0" in session.notified[0]


def test_a_stop_requested_before_the_call_takes_effect_at_once(session: Any, call: TrainCall) -> None:
    """Before the model is moved to its device and a rollout starts."""
    session.board.request_stop()
    with pytest.raises(Stopped):
        agree_on_resume(session, call, None)


class EpochTrainer:
    """A trainer that runs one epoch at a time."""

    def __init__(self) -> None:
        self.control = SimpleNamespace(should_training_stop=False)
        self.state = SimpleNamespace(global_step=5, max_steps=5)

    def _run_epoch(self) -> str:
        """Run."""
        return "trained"


def test_skipping_training_takes_no_step() -> None:
    """The epoch ends at once. Afterwards the trainer trains again."""
    trainer = EpochTrainer()
    with skip_training(trainer):
        assert trainer._run_epoch() is None  # type: ignore[func-returns-value]
        assert trainer.control.should_training_stop
    assert trainer._run_epoch() == "trained"


def test_a_call_that_is_given_more_steps_trains_them() -> None:
    """If the script now asks for more steps than the finished call took."""
    trainer = EpochTrainer()
    with skip_training(trainer, only_at_end=True):
        trainer.state.max_steps = 6
        assert trainer._run_epoch() == "trained"
        trainer.state.global_step = 6
        assert trainer._run_epoch() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("script_stopped", "step", "epoch_ended", "events"),
    [
        (True, 5, False, ["random state", "epoch end", "log, evaluate, save"]),
        (True, 5, True, []),
        (False, 9, False, ["random state", "epoch end", "log, evaluate, save"]),
        (False, 9, True, []),
        (False, 5, False, ["trained"]),
        (False, 5, True, ["trained"]),
    ],
)
def test_a_call_that_was_over_takes_no_step(
    session: Any, script_stopped: bool, step: int, epoch_ended: bool, events: list[str]
) -> None:
    """By the script or at its last step. What follows the step at the end of the epoch is made up for, once."""
    called: list[str] = []

    def on_epoch_end(args: Any, state: Any, control: Any) -> Any:
        called.append("epoch end")
        return control

    trainer = SimpleNamespace(
        args=SimpleNamespace(eval_on_start=True), model_wrapped=None, _tr_loss=None,
        state=SimpleNamespace(epoch=1.0, global_step=step, max_steps=9),
        control=SimpleNamespace(should_training_stop=False),
        callback_handler=SimpleNamespace(on_epoch_end=on_epoch_end),
        _run_epoch=lambda: called.append("trained"),
        _maybe_log_save_evaluate=lambda *arguments: called.append("log, evaluate, save"),
    )  # fmt: skip
    exact: Any = SimpleNamespace(
        script_stopped=script_stopped,
        epoch_ended=epoch_ended,
        load_rng=lambda: called.append("random state"),
    )
    restored = RestoredCall(trainer, session, exact)
    with restored.ended():
        restored.begin()
        trainer._run_epoch()
        assert not trainer.args.eval_on_start, "the undisturbed run evaluates once"
    assert called == events
    assert trainer.control.should_training_stop == ("trained" not in events)
    assert trainer.args.eval_on_start
