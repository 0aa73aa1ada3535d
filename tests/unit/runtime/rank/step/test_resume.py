"""What a `train()` call resumes from is agreed on, reported and journaled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.identities import identity

from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished, write_manifest
from grpo_run.runtime.errors import Stopped
from grpo_run.runtime.rank.step.guard import AttemptState
from grpo_run.runtime.rank.step.resume import CallFacts, agree_on_resume

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
    assert agree_on_resume(AttemptState(session), call, None, CallFacts()).choice.argument == str(path)
    assert session.notified == [f"train() call 1 (GRPOTrainer) resumes from {path}"]


def test_a_rejected_checkpoint_is_reported_and_journaled(
    session: Any, call: TrainCall, events: Events
) -> None:
    """The message has its path and the reason."""
    path = publish(call, 5)
    (path / "model.safetensors").write_bytes(b"weightz")
    assert agree_on_resume(AttemptState(session), call, None, CallFacts()).choice.argument is None
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
    assert agree_on_resume(AttemptState(session), call, None, CallFacts()).choice.finished
    assert [(record["event"], record["step"]) for record in events()] == [
        ("resume_chosen", 20),
        ("train_restored", 20),
    ]
    assert session.notified == [f"train() call 1 (GRPOTrainer) is already finished; restored from {path}"]


def test_checkpoints_of_another_run_are_warned_of(session: Any, call: TrainCall, events: Events) -> None:
    """The warning is journaled and printed."""
    publish(call, 5, run_id="run-0", finished=True)
    assert agree_on_resume(AttemptState(session), call, None, CallFacts()).choice.argument is None
    assert [record["event"] for record in events()] == ["warning", "resume_chosen"]
    assert "run-0" in session.notified[0]


def test_a_stop_requested_before_the_call_takes_effect_at_once(session: Any, call: TrainCall) -> None:
    """Before the model is moved to its device and a rollout starts."""
    session.board.request_stop()
    with pytest.raises(Stopped):
        agree_on_resume(AttemptState(session), call, None, CallFacts())
