"""What the journal says about reward functions."""

from __future__ import annotations

from typing import Any

import pytest
from support.journal import as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.rewards import ALL, MovedReward, RewardLatency

JUDGE = {"file": "/me/train.py", "function": "judge"}
OTHER = {"file": "/me/train.py", "function": "other"}
RAISED = {**JUDGE, "raised": True}
PLACE = MovedReward(**JUDGE)


def incident(failed: dict[str, Any] | None = JUDGE, step: int = 7, call: int = 1) -> dict[str, Any]:
    return {
        "event": "incident",
        "cause": "reward_stall",
        "step": step,
        "train_call": call,
        "failed_reward": failed,
    }


MOVED = {"event": "reward_moved", **JUDGE}


@pytest.mark.parametrize(
    ("events", "due"),
    [
        ([incident()], None),
        ([incident(), incident()], PLACE),
        ([incident(), incident(step=8)], None),
        ([incident(), incident(call=2)], None),
        ([incident(), incident(OTHER)], None),
        ([incident(), incident(OTHER), incident()], PLACE),
        ([incident(), incident(), incident(None)], None),
        ([incident(), incident(), MOVED], None),
        ([incident(), incident(), MOVED, incident()], None),
        ([incident(), incident(), {"event": "reward_moved", "function": "*"}], None),
        ([incident(RAISED), incident(RAISED)], PLACE),
        ([incident(RAISED, step=0), incident(RAISED, step=0)], None),
        ([incident(step=0), incident(step=0)], PLACE),
    ],
)
def test_a_function_is_due_after_its_second_failure_at_one_step(
    events: list[dict[str, Any]], due: MovedReward | None
) -> None:
    """One that has only ever raised is broken, and is not moved."""
    assert History.of(as_events(events)).rewards.due == due


def test_moved_functions_stay_moved_for_a_later_supervisor() -> None:
    history = History.of(
        as_events([MOVED, MOVED, {"event": "run_started"}, {"event": "reward_moved", "function": "*"}])
    )
    assert history.rewards.moved == [PLACE, ALL]


def test_failures_and_exclusions_are_counted_by_kind() -> None:
    failed = {"event": "reward_failed", "function": "judge", "kind": "timeout", "masked": 3}
    record = History.of(as_events([failed, failed, {**failed, "kind": "output", "masked": 1}])).rewards
    assert record.failures == {"timeout": 2, "output": 1}
    assert record.masked == 7


def test_latencies_are_totals_of_ranks_and_attempts() -> None:
    """Each event replaces the earlier one of its rank and attempt."""

    def event(rank: int, attempt: int, calls: int) -> dict[str, Any]:
        return {
            "event": "reward_latency", "function": "judge", "rank": rank, "attempt": attempt, "calls": calls,
            "total_seconds": 0.5 * calls, "longest_seconds": float(calls),
        }  # fmt: skip

    events = [event(0, 0, 1), event(0, 0, 4), event(1, 0, 2), event(0, 1, 3)]
    assert History.of(as_events(events)).rewards.by_function() == {
        "judge": RewardLatency(calls=9, total_seconds=4.5, longest_seconds=4.0)
    }


def test_an_invalid_event_is_counted_and_changes_nothing() -> None:
    history = History.of(
        as_events([{"event": "reward_failed"}, {"event": "reward_latency", "function": "judge"}])
    )
    assert history.unreadable == 2
    assert history.rewards.by_function() == {}
