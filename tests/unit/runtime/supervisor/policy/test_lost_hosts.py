"""Hosts that are lost are no failures of the script, and have a limit of their own."""

from __future__ import annotations

from dataclasses import replace

from support.builders.runtime.failure_stories import history, verdict
from support.journal import as_event

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide
from grpo_run.watchdog.causes import Cause

LOST = verdict(cause=Cause.node_lost, signature="node_lost")


def _lost(made: History, at: float, *, final: str = "", budget: int = 3) -> Decision:
    made.apply(
        as_event({"event": "incident", "cause": "node_lost", "step": 5, "signature": "node_lost",
                  "failed_at": at, "time": at})
    )  # fmt: skip
    decision = decide(
        made, replace(LOST, final=final), Budget(failures_without_progress=budget), stopping=False
    )
    made.apply(as_event({"event": "action", "action": str(decision.action), "patient": decision.patient}))
    return decision


def test_lost_hosts_do_not_use_up_the_budget_of_the_script() -> None:
    """Ten of them are survived, and more if they come within minutes."""
    made = history(["!killed"], trained=True)
    made.apply(as_event({"event": "action", "action": "restart"}))
    assert all(_lost(made, 1000.0 + at).restarts for at in range(20))
    assert made.failures_without_progress == 1


def test_hosts_that_are_lost_again_and_again_end_the_run() -> None:
    """With one sentence that says how often, and not before ten minutes."""
    made = history([], trained=True)
    decisions = [_lost(made, 1000.0 + 70 * at) for at in range(12)]
    assert [decision.action for decision in decisions[:10]] == [Action.restart] * 10
    ends = decisions[10]
    assert ends.reason.startswith("hosts were lost 11 times in 12 min without a newer checkpoint; ")


def test_a_lost_endpoint_ends_the_run_at_once() -> None:
    """The others cannot meet; and a budget of 0 restarts nothing."""
    assert _lost(history([], trained=True), 1.0, final="run them again").reason == "run them again"
    assert not _lost(history([], trained=True), 1.0, budget=0).restarts


def test_a_host_without_rank_0_sees_progress_where_its_ranks_resume() -> None:
    """It is not told of checkpoints, and would give the run up after a few faults of a week."""
    made = History.of([])
    for number in range(6):
        for event in (
            {"event": "attempt_started", "attempt": number, "world_size": 2, "node": 1},
            {"event": "train_started", "train_call": 1, "rank": 1, "step": 10 * number},
            {"event": "step_committed", "train_call": 1, "step": 10 * number + 12},
            {"event": "incident", "cause": "signal", "step": 10 * number + 13, "signature": f"at {number}"},
        ):
            made.apply(as_event({"time": 1000.0 + number, **event}))
        assert made.failures_without_progress == 1
        assert decide(made, verdict(), Budget(failures_without_progress=1), stopping=False).restarts
