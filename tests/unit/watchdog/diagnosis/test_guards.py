"""The verdict on an attempt that a learning guard has ended."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import diagnose_guard
from grpo_run.watchdog.learning_rules import GuardResponse, LearningGuard, Trip
from grpo_run.watchdog.observation import Exit, RankError


def left(rank: int, trip: Trip | None, *, wall_time: float = 1.0, **fields: Any) -> Exit:
    """A rank that has left its script."""
    error = RankError(
        type="GuardTripped" if trip else "RuntimeError", message="m", traceback="t", location=None,
        wall_time=wall_time, trip=trip,
    )  # fmt: skip
    return Exit(rank=rank, pid=rank, exit_code=93, signal=None, order=rank, error=error, **fields)


def trip(guard: LearningGuard, onset: int = 5) -> Trip:
    """A trip at step 7."""
    return Trip(guard=guard, response=GuardResponse.roll_back, step=7, onset=onset, sentence="It fell.")


@pytest.mark.parametrize("guard", LearningGuard)
def test_the_cause_follows_from_the_guard(guard: LearningGuard) -> None:
    """Every guard has advice; no rank is to blame."""
    verdict = diagnose_guard([left(0, trip(guard))], {0: None, 1: None})
    assert verdict is not None
    assert verdict.cause is (Cause.nonfinite if guard is LearningGuard.nonfinite else Cause.learning_collapse)
    assert (verdict.step, verdict.culprits, verdict.sentence) == (7, (), "It fell.")
    assert len(verdict.advice) == 2
    assert "(below 5) and, if it has one, another --run-dir" in verdict.advice[1]


def test_the_first_trip_counts_and_other_failures_follow_from_it() -> None:
    """A rank whose generation failed because of the weights, and one that only took part in the vote."""
    exits = [
        left(0, None),
        left(1, trip(LearningGuard.kl), wall_time=3.0),
        left(2, trip(LearningGuard.reward), wall_time=2.0),
    ]
    verdict = diagnose_guard(exits, {})
    assert verdict is not None
    assert verdict.trip == trip(LearningGuard.reward)


def test_without_a_trip_it_is_another_fault() -> None:
    """Exits are diagnosed as before."""
    assert diagnose_guard([left(0, None), Exit(rank=1, pid=1, exit_code=None, signal=9, order=1)], {}) is None
