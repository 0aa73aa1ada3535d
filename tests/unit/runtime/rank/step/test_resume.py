"""What a `train()` call resumes from is agreed on, reported and journaled."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.identities import identity

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished, write_manifest
from grpo_run.runtime.errors import Stopped
from grpo_run.runtime.rank.resuming.request import ResumeChoice
from grpo_run.runtime.rank.step.guard import AttemptState
from grpo_run.runtime.rank.step.resume import CallFacts, agree_on_resume

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def call(tmp_path: Path) -> TrainCall:
    """The script's first call."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out"))


def publish(
    call: TrainCall, step: int, *, run_id: str = "run-1", finished: bool = False, ranks: int = 1
) -> Path:
    """Write a complete checkpoint."""
    path = Path(call.output_dir) / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    write_manifest(path, identity(step=step, run_id=run_id, train_call=call, world_size=ranks))
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


def older_attempt(output: str, session: Any) -> Path:
    """What an attempt over several hosts leaves that is killed between two renames of checkpoint-5."""
    fence = fencing.prepare(Path(output), session.config.run_id)
    path = Path(output) / "checkpoint-5"
    os.rename(path, fencing.place_in(fence, path))
    return fence


class Heard:
    """The votes of a rank, and what is there when they begin."""

    def __init__(self, session: Any, fence: Path) -> None:
        self._votes, self._fence = session.votes, fence
        self.seen: list[bool] = []

    def maximum(self, value: int) -> int:
        """Note whether the older attempt can still publish."""
        self.seen.append(self._fence.exists())
        return int(self._votes.maximum(value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._votes, name)


def test_an_attempt_over_several_hosts_ends_the_one_before(session: Any, call: TrainCall) -> None:
    """After all ranks have been heard of, and before it looks for what to resume from."""
    path = publish(call, 5, ranks=2)
    older = older_attempt(call.output_dir, session)
    session.world_size, session.votes = 2, (votes := Heard(session, older))
    agreed = agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert votes.seen[0]
    assert not older.exists()
    assert agreed.choice.argument == str(path)
    fence = session.fence(call.output_dir)
    assert fence.is_dir()
    assert agreed.choice.fence == str(fence)
    assert fencing.recorded(session.config.run_directory, call.output_dir) == fence
    again = agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert again.choice.fence == str(fence)
    assert fence.is_dir()


def test_what_a_host_took_before_the_others_went_on_without_it_is_refused(
    session: Any, call: TrainCall
) -> None:
    """Its fence of then is gone. An attempt that follows the last one directly refuses nothing."""
    publish(call, 5, ranks=2)
    session.world_size, folder = 2, session.config.run_directory
    own = older_attempt(call.output_dir, session)
    fencing.record(folder, Path(call.output_dir), own, made=True)
    session.settings = session.settings.model_copy(update={"attempt": 4})
    agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert fencing.refused_before(folder, call.output_dir) == 0
    session.fences.clear()
    shutil.rmtree(fencing.recorded(folder, call.output_dir))  # type: ignore[arg-type]
    agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert fencing.refused_before(folder, call.output_dir) == 4


def test_another_rank_uses_the_fence_of_rank_zero(session: Any, call: TrainCall, tmp_path: Path) -> None:
    """The first one of its host records it for the supervisor, which does not remove it."""
    sent = tmp_path / "out" / "_grpo_run" / "run-1" / ".attempt-1" / "1f3a"
    sent.mkdir(parents=True)
    text = ResumeChoice(argument=None, fence=str(sent), ordinal=1).to_text().encode()
    session.world_size, session.rank, session.is_main = 2, 1, False
    session.votes = SimpleNamespace(
        collect=lambda: None, maximum=lambda value: len(text) if value == 0 and session.asked else 0,
        gather=lambda values: [list(text)] if len(values) > 1 else [[1], [1]],
    )  # fmt: skip
    session.asked = 0
    maximum = session.votes.maximum

    def counted(value: int) -> int:
        found = maximum(value)
        session.asked += 1
        return int(found)

    session.votes.maximum = counted
    agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert session.fence(call.output_dir) == sent
    assert fencing.recorded(session.config.run_directory, call.output_dir) == sent
    fencing.close_recorded(session.config.run_directory, None)
    assert sent.exists()


def test_a_stop_before_the_call_leaves_no_fence(session: Any, call: TrainCall) -> None:
    """The older attempt may still publish: nothing of this one has begun."""
    publish(call, 5)
    older = older_attempt(call.output_dir, session)
    session.world_size = 2
    session.board.request_stop()
    with pytest.raises(Stopped):
        agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert older.exists()
    assert [path.name for path in older.parents[1].iterdir()] == [older.parent.name]


def test_a_run_on_one_host_has_no_fence(session: Any, call: TrainCall) -> None:
    """It ends an older attempt over several hosts all the same."""
    path = publish(call, 5)
    agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert os.listdir(call.output_dir) == ["checkpoint-5"]
    older = older_attempt(call.output_dir, session)
    fencing.record(session.config.run_directory, Path(call.output_dir), older, made=True)
    agreed = agree_on_resume(AttemptState(session), call, None, CallFacts())
    assert agreed.choice.argument == str(path)
    assert agreed.choice.fence is None
    assert not older.exists()
    assert os.listdir(call.output_dir) == ["checkpoint-5"]
    assert fencing.recorded(session.config.run_directory, call.output_dir) is None


def test_where_no_fence_can_be_made_the_user_is_told(
    session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on."""
    publish(call, 5, ranks=2)
    session.world_size = 2

    def refuse(output_dir: Path, run_id: str) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(fencing, "prepare", refuse)
    assert agree_on_resume(AttemptState(session), call, None, CallFacts()).choice.fence is None
    assert session.notified[0] == (
        "a host that has lost touch could still change the checkpoints of this run: [Errno 30] Read-only file"
        " system"
    )
