"""A start that fails on files or the network is tried for ten minutes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.builders.runtime.failure_stories import NO_START, history, verdict
from support.journal import as_event

from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide
from grpo_run.watchdog.causes import Cause, Origin


def starts(
    *, seconds: float, budget: int = 3, origin: Origin = Origin.network, trained: bool = True
) -> list[Decision]:
    """Decide on starts that fail after a kill, each after the delay decided before and 2 s, for a number of
    seconds.
    """
    made = history(["!killed"], trained=trained)
    made.apply(as_event({"event": "action", "action": "restart"}))
    decisions: list[Decision] = []
    at, number = 1000.0, 0
    while at < 1000.0 + seconds:
        number += 1
        what = replace(NO_START, origin=origin, signature=f"ConnectionError@hub.py:{number % 2}:step0")
        made.apply(as_event({"event": "attempt_started", "attempt": number, "time": at}))
        made.apply(
            as_event({"event": "incident", "cause": "startup_failure", "step": 0, "signature": what.signature,
            "starting": True,
             "failed_at": at, "time": at})
        )  # fmt: skip
        decision = decide(made, what, Budget(failures_without_progress=budget), stopping=False)
        made.apply(as_event({"event": "action", "action": str(decision.action), "patient": decision.patient}))
        decisions.append(decision)
        if decision.action is Action.stop:
            break
        at += 2.0 + decision.delay_seconds
    assert not trained or budget == 0 or made.failures_without_progress <= 2
    return decisions


@pytest.mark.parametrize("origin", [Origin.network, Origin.files])
def test_a_start_that_fails_on_files_or_the_network_is_tried_for_ten_minutes(origin: Origin) -> None:
    """With growing delays, whatever the restart budget; then the run ends."""
    decisions = starts(seconds=3000.0, origin=origin)
    assert decisions[-1].action is Action.stop
    assert "could not start for 10 min" in decisions[-1].reason
    delays = [decision.delay_seconds for decision in decisions[:-1]]
    assert delays[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(delays[6:]) == {30.0}
    assert sum(delays) + 2.0 * len(delays) >= 600.0


def test_the_hub_is_away_for_20_seconds_or_for_9_minutes() -> None:
    """The run is still there."""
    for seconds in (20.0, 540.0):
        assert {decision.action for decision in starts(seconds=seconds)} == {Action.restart}


def test_a_start_that_takes_minutes_to_fail_is_tried_more_than_once() -> None:
    """A download with long timeouts has not had its chances after one try."""
    assert {decision.action for decision in starts_at(0.0, 700.0, 1400.0)} == {Action.restart}


def starts_at(*times: float) -> list[Decision]:
    """Decide on starts that fail on a file at these times."""
    made, decisions = history([]), []
    for at in times:
        made.apply(
            as_event(
                {
                    "event": "incident",
                    "cause": "exception",
                    "starting": True,
                    "failed_at": 5000.0 + at,
                    "signature": "s",
                }
            )
        )
        decisions.append(decide(made, replace(NO_START, origin=Origin.files), Budget(), stopping=False))
        made.apply(
            as_event(
                {"event": "action", "action": str(decisions[-1].action), "patient": decisions[-1].patient}
            )
        )
    return decisions


def fourth_try(seconds: float) -> Decision:
    """Decide on the fourth failed start in a row, a number of seconds after the first."""
    return starts_at(0.0, 100.0, 200.0, seconds)[-1]


def test_the_fourth_try_ends_the_run_from_ten_minutes_on() -> None:
    """And not a second earlier."""
    assert fourth_try(599.5).action is Action.restart
    assert fourth_try(600.0).action is Action.stop


def test_the_reason_of_a_patient_try_says_from_where_and_how_long() -> None:
    """The run has trained, so it does not start from the beginning although its calls are not known here."""
    reason = fourth_try(300.0).reason
    assert reason.startswith("from the checkpoint that rank 0 chooses, in 8 s")
    assert "10 min" in reason


def test_a_budget_of_one_waits_for_a_hub_as_well() -> None:
    """Only `--max-restarts 0` restarts nothing."""
    assert {decision.action for decision in starts(seconds=60.0, budget=1)} == {Action.restart}


def test_nobody_waits_for_a_hub_without_progress_or_budget() -> None:
    """A run that has nothing to lose reports a wrong model name soon; `--max-restarts 0` restarts nothing."""
    assert [decision.action for decision in starts(seconds=3000.0, trained=False)][-1] is Action.stop
    assert len(starts(seconds=3000.0, trained=False)) <= 3
    assert [decision.action for decision in starts(seconds=3000.0, budget=0)] == [Action.stop]


def test_a_connection_that_fails_before_the_attempts_first_step_is_tried_patiently_too() -> None:
    """A data set that is streamed fails inside `train()`. After a step of the attempt, it is a failure of
    that step.
    """
    lost = verdict(cause=Cause.exception, signature="s", deterministic=True, origin=Origin.network)
    story = history(["!s", "!s", "!s"])
    story.apply(as_event({"event": "attempt_started", "attempt": 3}))
    assert decide(story, lost, Budget(), stopping=False).patient
    story.apply(as_event({"event": "step_committed", "step": 8, "train_call": 1}))
    assert decide(story, lost, Budget(), stopping=False).action is Action.stop


@pytest.mark.parametrize("origin", [origin for origin in Origin if origin is not Origin.network])
def test_only_connections_are_tried_patiently_inside_train(origin: Origin) -> None:
    """A file that is missing there will be missing again."""
    lost = verdict(cause=Cause.exception, signature="s", deterministic=True, origin=Origin.network)
    story = history(["!s"])
    story.apply(as_event({"event": "attempt_started", "attempt": 1}))
    assert decide(story, lost, Budget(), stopping=False).patient
    decision = decide(story, replace(lost, origin=origin), Budget(), stopping=False)
    assert decision.action is Action.restart
    assert not decision.patient


def test_restarts_that_a_feature_answers_are_no_failed_starts() -> None:
    """A server that has failed now and then for a day does not use up the time of a hub that is away."""
    made = history([])
    for at in (0.0, 40_000.0, 80_000.0):
        fault = {
            "event": "incident",
            "cause": "rollout_server_dead",
            "failed_at": 5000.0 + at,
            "signature": "s",
        }
        made.apply(as_event(fault))
        made.apply(as_event({"event": "action", "action": "restart", "patient": True}))
    start = {
        "event": "incident",
        "cause": "exception",
        "starting": True,
        "failed_at": 90_000.0,
        "signature": "t",
    }
    made.apply(as_event(start))
    decision = decide(made, replace(NO_START, origin=Origin.network), Budget(), stopping=False)
    assert decision.action is Action.restart
