"""What is said about a script that trains by itself, and what counts as its progress."""

from __future__ import annotations

from typing import Any

import pytest
from support.journal import as_event, as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.no_trainer_script import NoTrainerScript, summarize
from grpo_run.runtime.history.summary import summarize as summarize_run

NOW = 1180.0
ANEW = "The same command runs the script from the beginning; nothing is saved."
AGAIN = "No Trainer and no loop: a restart runs the script from the beginning; nothing is saved."
UNCOUNTED = "The script used no Trainer and no loop, so no steps were counted."
SAVED = (
    "the script's own checkpoints: last saved in out/a 3 min ago; whether it resumes from them is up to the"
    " script"
)


def record(event: str, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    """A record of the journal, written at 1000 s."""
    return {"time": 1000.0, "event": event, "attempt": attempt, "rank": 0, **fields}


def saved(path: str) -> dict[str, Any]:
    """A save of the script's own that is complete."""
    return record("script_checkpoint", path=path, saved_at=1000.0)


def test_it_trains_by_itself_until_a_train_call_or_the_next_attempt_begins() -> None:
    """That it was seen stays."""
    history = History.of(as_events([record("trains_without_trainer")]))
    assert (history.no_trainer.seen, history.no_trainer.current) == (True, True)
    history.apply(as_event(record("train_started", train_call=1, step=0)))
    assert (history.no_trainer.seen, history.no_trainer.current) == (True, False)
    history.apply(as_event(record("trains_without_trainer")))
    assert history.no_trainer.current
    history.apply(as_event(record("attempt_started", attempt=1, world_size=1)))
    assert (history.no_trainer.seen, history.no_trainer.current) == (True, False)


def test_a_restart_is_over_when_the_script_trains_again() -> None:
    """There is no committed step that would show it."""
    history = History.of(as_events([
        record("attempt_started"), record("trains_without_trainer"),
        record("incident", cause="signal", failed_at=998.0), record("action", action="restart", reason="x"),
        record("attempt_started", attempt=1),
    ]))  # fmt: skip
    assert history.restarting
    history.apply(as_event(record("trains_without_trainer", attempt=1)))
    assert not history.restarting
    assert history.recoveries[0].recovery_seconds == 2.0


@pytest.mark.parametrize(
    ("saves", "failures"),
    [
        ([["a"], []], 2),
        ([["a"], ["b"]], 1),
        ([["a"], ["a"]], 2),
        ([["a", "a"], ["a", "a"]], 1),
        ([["a", "b"], ["b", "a"]], 2),
    ],
)
def test_a_directory_that_is_written_again_is_no_progress(saves: list[list[str]], failures: int) -> None:
    """Unless the script writes it twice in one attempt. Each attempt ends with a fault."""
    history = History()
    for attempt, paths in enumerate(saves):
        history.apply(as_event(record("attempt_started", attempt)))
        for path in paths:
            history.apply(as_event(saved(path)))
        history.apply(as_event(record("incident", attempt, cause="signal")))
    assert history.failures_without_progress == failures


def test_the_goodput_of_steps_that_are_not_counted_is_unknown() -> None:
    """It would be 0."""
    history = History.of(as_events([record("run_started"), record("trains_without_trainer")]))
    assert history.goodput(NOW) is None


def test_a_stop_with_code_0_leaves_a_run_that_is_not_finished() -> None:
    """The same command starts the script again."""
    history = History.of(
        as_events([record("trains_without_trainer"), record("run_ended", exit_code=0, stopped=True)])
    )
    assert (history.state, history.finished) == ("stopped", False)


@pytest.mark.parametrize(
    ("state", "code", "restarts", "sentence"),
    [
        ("running", None, 0, f"Running. {AGAIN}"),
        ("running", None, 2, f"Running after 2 restarts. {AGAIN}"),
        ("finished", 0, 0, f"Finished, no faults. {UNCOUNTED}"),
        ("finished", 0, 1, f"Finished after 1 restart. {UNCOUNTED}"),
        ("stopped", 93, 0, f"Stopped. {ANEW}"),
        ("stopped", 0, 1, f"Stopped after 1 restart: the script returned 0. {ANEW}"),
        ("unknown", None, 0, f"Unknown: the supervisor exited without ending the run. {ANEW}"),
    ],
)
def test_the_state_is_said_without_steps_or_checkpoints(
    state: str, code: int | None, restarts: int, sentence: str
) -> None:
    """Nothing of the run can be resumed."""
    assert summarize(NoTrainerScript(seen=True), state, code, restarts=restarts, now=NOW) == sentence


def test_checkpoints_of_the_script_are_named_with_their_age() -> None:
    """What the script does with them is not claimed."""
    own = History.of(as_events([record("trains_without_trainer"), saved("out/a")])).no_trainer
    assert own.restart(NOW) == f"restarts the script from its beginning; {SAVED}"
    assert (
        summarize(own, "stopped", 75, restarts=0, now=NOW)
        == f"Stopped. The same command runs the script from the beginning; {SAVED}."
    )


def test_a_script_that_trained_before_is_summarized_by_its_steps() -> None:
    """What it does now is said, too."""
    history = History.of(
        as_events(
            [record("train_started", train_call=1, step=0), record("step_committed", train_call=1, step=4)]
        )
    )
    history.apply(as_event(record("trains_without_trainer")))
    assert summarize_run("running", history).endswith(
        "no faults. The script takes optimizer steps of its own since its last train() call; they are not"
        " saved."
    )


def test_a_trainer_that_is_not_guarded_is_named() -> None:
    """It would be false to say that there is none."""
    own = History.of(as_events([record("trains_without_trainer", trainer="PPOTrainer")])).no_trainer
    assert own.what_trains() == "PPOTrainer takes optimizer steps outside a guarded train() call"
