"""The other guards: when each of them trips, and that healthy observations trip none."""

from __future__ import annotations

import json
import math

import pytest

from grpo_run.runtime.features.learning_guards._judge import (
    MAX_LENGTH,
    NOT_FINITE,
    ObservationHistory,
    Trip,
    judge,
)
from grpo_run.runtime.features.learning_guards.settings import GuardResponse, LearningGuard, Rules
from grpo_run.watchdog.json_values import from_json, to_json


def run(
    values: list[dict[str, float]], rules: Rules | None = None, history: ObservationHistory | None = None
) -> list[Trip]:
    """All alarms of a run of these steps."""
    history, found = history or ObservationHistory(), []
    for step, one in enumerate(values, start=1):
        history.add(step, one)
        found += judge(history, step, rules or Rules())
    return found


def test_nonfinite_trips_once_for_a_row_of_steps() -> None:
    """A warning for each step would be noise; a second row is a second alarm."""
    good, bad = dict[str, float](), {NOT_FINITE: 1.0}
    alarms = run([good, bad, bad, bad, good, bad])
    assert [(alarm.guard, alarm.step, alarm.onset) for alarm in alarms] == [
        (LearningGuard.nonfinite, 2, 2),
        (LearningGuard.nonfinite, 6, 6),
    ]


def test_a_guard_that_is_off_is_not_asked() -> None:
    """Each of them alone."""
    values = {"zero_variance": 1.0, "kl": 99.0, "capped": 1.0, "entropy": 1e-9, "mismatch": 1.0, "tools": 1.0}
    values["aborted"] = 1.0
    bad = [{NOT_FINITE: 1.0, **values}] * 40
    limits = {
        LearningGuard.capped: 0.5,
        LearningGuard.entropy: 0.1,
        LearningGuard.mismatch: 0.1,
        LearningGuard.tools: 0.5,
        LearningGuard.aborted: 0.5,
    }
    found = {alarm.guard for alarm in run(bad, Rules(limits=limits))}
    assert found == set(LearningGuard) - {LearningGuard.reward}
    for guard in found:
        rules = Rules(limits=limits, responses={guard: GuardResponse.off})
        assert {alarm.guard for alarm in run(bad, rules)} == found - {guard}


def test_a_warning_is_repeated_only_after_new_observations() -> None:
    """The series begins anew, so the next alarm needs as many observations again."""
    alarms = run([{"zero_variance": 1.0}] * 65)
    assert [alarm.step for alarm in alarms] == [30, 60]


def test_a_step_without_a_rollout_is_not_judged_again() -> None:
    """Several steps may train on one rollout."""
    steps = [{"kl": 99.0}] * 2 + [{}] * 5
    assert run(steps) == []


def test_the_history_survives_json_exactly_and_is_bounded() -> None:
    """A resumed run raises the same alarms."""
    history = ObservationHistory()
    for step in range(1, 1000):
        history.add(
            step, {"reward": math.sin(step) / 3, "kl": math.nan} | ({NOT_FINITE: 1.0} if step % 2 else {})
        )
    copy = ObservationHistory.from_json(json.loads(json.dumps(history.as_json())))
    assert copy.as_json() == history.as_json()
    assert len(copy.series("reward")) == MAX_LENGTH
    assert len(copy.series("kl")) == 0


@pytest.mark.parametrize("value", [[3], {"reward": 3}, {"reward": [[1]]}, {"reward": [["a", "b"]]}, None])
def test_a_damaged_history_is_a_value_error(value: object) -> None:
    """The caller begins without a history then."""
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
        ObservationHistory.from_json(value)


def test_a_trip_survives_json() -> None:
    """It travels in the error file of a rank."""
    fields = {"step": 7, "onset": 5, "sentence": "No.", "response": GuardResponse.roll_back}
    trip = Trip(guard=LearningGuard.zero_variance, **fields)  # type: ignore[arg-type]
    assert from_json(Trip, json.loads(json.dumps(to_json(trip)))) == trip
    assert to_json(trip)["guard"] == "zero-variance"
