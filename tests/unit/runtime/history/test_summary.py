"""One sentence on the state of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.journal import as_event, as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.summary import lacks_model_of_script, summarize


def test_a_run_that_left_its_loop_finishes_at_the_step_where_it_did() -> None:
    """No vote follows that step, so it is one more than the last that was committed."""
    started = {
        "event": "train_started", "rank": 0, "train_call": 1, "step": 0, "target_steps": 30,
        "trainer_class": "loop", "output_dir": "/out", "time": 5.0,
    }  # fmt: skip
    committed = {"event": "step_committed", "train_call": 1, "step": 7, "target_steps": 30, "time": 6.0}
    left = {"event": "loop_left", "train_call": 1, "ends_after": 8, "time": 7.0}
    history = History.of(as_events([started, committed, {**left, "rank": 0}, {**left, "rank": 1}]))
    assert summarize("finished", history, 0) == (
        "Finished at step 8 of 30, where the script left the loop, no faults."
    )
    history.apply(as_event({"event": "train_ended", "train_call": 1, "time": 8.0}))
    assert summarize("finished", history, 0) == "Finished at step 7 of 30, no faults."


def test_before_the_target_is_known_only_the_step_is_shown() -> None:
    """The text has no `of 0`."""
    assert summarize("starting", History(attempts=1)) == ("Starting at step 0, attempt 1, no faults.")


def test_a_restart_is_not_called_a_start() -> None:
    """Until a step is committed after the fault."""
    fault = Recovery(cause="signal", rank=0, step=40, action="restart")
    history = History(attempts=2, step=40, target_steps=200, recoveries=[fault])
    assert summarize("starting", history) == "Restarting after step 40 of 200, attempt 2, no fault recovered."
    fault.recovery_seconds = 1.0
    assert summarize("starting", history) == "Starting at step 40 of 200, attempt 2, 1 fault recovered."


@pytest.mark.parametrize(
    ("recovery_seconds", "faults"),
    [([], "no faults"), ([None], "no fault recovered"), ([0.5], "1 fault recovered")],
)
def test_a_summary_counts_recovered_faults(recovery_seconds: list[float | None], faults: str) -> None:
    """A fault without a recovery is not called no fault."""
    recoveries = [
        Recovery(cause="signal", rank=0, step=1, action="stop", recovery_seconds=seconds)
        for seconds in recovery_seconds
    ]
    sentence = summarize("running", History(attempts=1, step=3, train_call=1, recoveries=recoveries))
    assert sentence == f"Running at step 3, attempt 1, {faults}."


def test_a_finished_script_without_a_trainer_is_not_at_step_0() -> None:
    """There are no steps to count."""
    sentence = summarize("finished", History(attempts=1), 0)
    assert sentence == "Finished, no faults. The script did not use a Trainer, so no steps were counted."


def test_a_stopped_run_without_a_checkpoint_is_shown_as_such() -> None:
    """It restarts from the beginning."""
    assert "no checkpoint yet" in summarize("stopped", History(exit_code=75, train_call=1))
    assert summarize("stopped", History(exit_code=75)) == (
        "Stopped before the first step of a Trainer. Run the same command to start again."
    )


@pytest.mark.parametrize(("keys", "said"), [
    (["exception: KeyError at train.py:33 in judge (phase reward)"] * 19,
     "19 faults recovered, 19 of them KeyError at train.py:33 in judge (phase reward)."),
    (["exception: A at a.py:1", "", "exception: A at a.py:1", "exception: B at b.py:2"],
     "4 faults recovered, 2 of them A at a.py:1."),
    (["exception: A at a.py:1", "exception: B at b.py:2", ""], "3 faults recovered."),
])  # fmt: skip
def test_a_bug_that_a_run_has_recovered_from_again_and_again_is_in_its_last_line(
    keys: list[str], said: str
) -> None:
    """With its count and its line; a user who sees only how the run has ended learns of it."""
    recoveries = [
        Recovery(cause="exception", rank=0, step=1, action="restart", recovery_seconds=1.0, repeat_key=key)
        for key in keys
    ]
    history = History(step=40, target_steps=40, train_call=1, recoveries=recoveries)
    assert summarize("finished", history, 0) == f"Finished at step 40 of 40, {said}"


@pytest.mark.parametrize(
    ("trainer_class", "events", "lacks"),
    [
        ("GRPOTrainer", (), True),
        ("GRPOTrainer", ("snapshot",), True),
        ("GRPOTrainer", ("checkpoint",), False),
        ("GRPOTrainer", ("checkpoint", "snapshot"), False),
        ("GRPOTrainer", ("model",), False),
        ("loop", (), False),
    ],
)
def test_a_script_lacks_a_model_unless_it_has_saved_one_or_may_have(
    tmp_path: Path, trainer_class: str, events: tuple[str, ...], lacks: bool
) -> None:
    """A snapshot of the run is none of the script's; what a hand-written loop saves is not seen."""
    published = {"event": "checkpoint_published", "train_call": 1, "path": str(tmp_path), "verified": True}
    records = {
        "snapshot": {**published, "step": 4, "scheduled": False},
        "checkpoint": {**published, "step": 3, "scheduled": True},
        "model": {"event": "model_saved", "path": str(tmp_path)},
    }
    started = {
        "event": "train_started", "rank": 0, "train_call": 1, "step": 0, "target_steps": 4,
        "trainer_class": trainer_class, "output_dir": str(tmp_path), "time": 5.0,
    }  # fmt: skip
    history = History.of(as_events([started, *({**records[name], "time": 6.0} for name in events)]))
    history.train_call = 1
    assert lacks_model_of_script(history) is lacks


def test_a_script_without_a_trainer_lacks_no_model() -> None:
    """What it saves by itself is not seen."""
    assert not lacks_model_of_script(History(attempts=1))
