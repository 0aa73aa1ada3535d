"""What a call publishes: its start, its phases, its metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.builders.trainers.callback_loop import Events, FakeCadence, Loop, Reading
from support.journal import as_events
from transformers import TrainerControl

from grpo_run.runtime.history.history import History
from grpo_run.watchdog.observation import Phase, RankState


def test_the_start_of_a_call_is_published(loop: Loop, reading: Reading, events: Events) -> None:
    """The slot shows state, call and target steps; the journal has `train_started`."""
    slot = reading()
    assert (slot.state, slot.train_call, slot.step, slot.target_steps) == (RankState.training, 1, 0, 10)
    assert slot.phase is Phase.data
    (record,) = events()
    assert (record["event"], record["step"], record["target_steps"]) == ("train_started", 0, 10)
    assert isinstance(loop.cadence, FakeCadence)
    assert loop.cadence.begun == [0]


def test_a_resumed_call_starts_at_its_step(session: Any, reading: Reading) -> None:
    """The step it resumes from counts as committed."""
    Loop(session).begin(4)
    slot = reading()
    assert (slot.step, slot.voted_step, slot.committed_step, slot.resumed_step) == (4, 4, 4, 4)


def test_a_restored_call_journals_no_start(session: Any, reading: Reading, events: Events) -> None:
    """All its steps were taken earlier; `train_started` would count as a resume from its last step."""
    Loop(session, restoring=True).begin(10)
    assert (reading().train_call, reading().step) == (1, 10)
    assert events() == []


def test_the_phases_of_a_step(loop: Loop, reading: Reading) -> None:
    """Forward and backward, then optimizer, then data."""
    control = TrainerControl()
    loop.callback.on_step_begin(loop.args, loop.state, control)
    assert reading().phase is Phase.forward_backward
    loop.callback.on_pre_optimizer_step(loop.args, loop.state, control)
    assert reading().phase is Phase.optimizer
    loop.state.global_step = 1
    loop.callback.on_step_end(loop.args, loop.state, control)
    assert [entry.phase for entry in reading().phases] == [Phase.data]


def test_logged_metrics_are_published(loop: Loop, reading: Reading, events: Events) -> None:
    """On the board and in the journal, under grpo-run's field names; other metrics are ignored."""
    logs = {
        "reward": 0.5,
        "completions/mean_length": 12.0,
        "loss": 0.25,
        "learning_rate": 1e-5,
        "kl": 0.1,
        "speed": 2.0,
    }
    loop.state.global_step = 3
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    slot = reading()
    assert [slot.value(name) for name in ("reward", "completion_length", "loss")] == [0.5, 12.0, 0.25]
    (record,) = [record for record in events() if record["event"] == "step_logged"]
    assert (record["step"], record["reward"], record["completion_length"]) == (3, 0.5, 12.0)
    assert record["kl"] == 0.1
    assert "speed" not in record


def test_the_rewards_of_each_function_are_journaled(loop: Loop, events: Events) -> None:
    """Under their names; of many, the last ones in alphabetical order share an entry, and NaN counts for
    none.
    """
    logs: dict[str, Any] = {
        f"rewards/f{number}/{key}": number + half
        for number in range(11)
        for key, half in (("mean", 0.0), ("std", 0.5))
    }
    logs |= {"reward": 1.0, "rewards/f3/std": math.nan, "rewards/f4/std": None, "eval_rewards/f9/mean": 7.0}
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs={"reward": 2.0})
    first, second = [record for record in events() if record["event"] == "step_logged"]
    functions = first["reward_functions"]
    assert list(functions) == ["f0", "f1", "f10", "f2", "f3", "f4", "f5", "f6", "other"]
    assert functions["f10"] == {"mean": 10.0, "std": 10.5}
    assert functions["f3"] == {"mean": 3.0}
    assert functions["f4"] == {"mean": 4.0}
    assert functions["other"] == {"mean": 8.0, "std": 8.5}
    assert "reward_functions" not in second
    assert History.of(as_events(events())).rewards.logged == functions


def test_the_clipped_shares_by_side_are_journaled(loop: Loop, events: Events) -> None:
    """As TRL names them; the share of all is a field of its own, and NaN is none."""
    logs = {"clip_ratio/region_mean": 0.3, "clip_ratio/low_mean": 0.1, "clip_ratio/high_max": math.nan}
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    (record,) = [record for record in events() if record["event"] == "step_logged"]
    assert (record["clip_ratio"], record["clipped"]) == (0.3, {"low_mean": 0.1})


def test_the_summary_of_a_call_is_not_journaled_as_a_step(loop: Loop, events: Events) -> None:
    """Its loss is a mean over the whole call."""
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs={"train_runtime": 3.0, "loss": 0.5})
    assert [record for record in events() if record["event"] == "step_logged"] == []


@pytest.mark.parametrize("logs", [None, {}, {"reward": "high"}, {"reward": True}])
def test_logs_without_numbers_are_ignored(loop: Loop, reading: Reading, logs: dict[str, Any] | None) -> None:
    """They neither change the board nor raise."""
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    assert math.isnan(reading().value("reward"))
