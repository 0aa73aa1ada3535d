"""The decision after a failure: restart, or give up. Pure: (history, verdict, budget) to a decision.

The budget counts failures since the highest checkpoint of the run last rose. A run that makes progress is
therefore never given up for the number of its faults, and a run without progress ends. A failure that is
certain to repeat (the same error at the same line and step) causes only one restart. A script that fails
before its first step is restarted only if an earlier attempt got further. Called by `faults.py`. Does not
act.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from grpo_run.runtime.continuity.expected import expected_start
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.record.history import History
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Verdict


class Action(str, Enum):
    """What follows an incident. The values appear in the journal and as metric labels."""

    restart = "restart"
    restart_from_earlier_checkpoint = "restart_from_earlier_checkpoint"
    restart_with_plan_change = "restart_with_plan_change"
    quarantine_batch = "quarantine_batch"
    checkpoint_and_stop = "checkpoint_and_stop"
    stop = "stop"

    def __str__(self) -> str:
        return self.value


RESTARTS = frozenset(
    {Action.restart, Action.restart_from_earlier_checkpoint, Action.restart_with_plan_change}
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, and the reason shown to the user."""

    action: Action
    reason: str


def decide(history: History, verdict: Verdict, budget: Budget, *, stopping: bool) -> Decision:
    """Return what follows the latest incident.

    Args:
        history: contains this incident as its last recovery.
        verdict: of this incident.
        budget: limit on consecutive failures.
        stopping: a stop was requested, so nothing is restarted.
    """
    if stopping:
        return Decision(action=Action.stop, reason="a stop was requested")
    if verdict.cause is Cause.startup_failure and verdict.deterministic and history.best_position == (0, 0):
        return Decision(
            action=Action.stop, reason="the script failed before its first step; a restart would repeat it"
        )
    failures = history.failures_without_progress
    earlier = history.recoveries[-failures:-1] if failures else []  # since the last progress
    same = [recovery for recovery in earlier if recovery.signature == verdict.signature]
    if verdict.deterministic and (same or _is_repeated(history)):
        return Decision(action=Action.stop, reason="the same failure occurred again at the same step")
    if failures > budget.failures_without_progress:
        return Decision(
            action=Action.stop,
            reason=f"{failures} failure{'' if failures == 1 else 's'} in a row without a newer checkpoint (budget {budget.failures_without_progress})",
        )
    start = expected_start(history.calls, trained=history.best_position > (0, 0))
    return Decision(action=Action.restart, reason=start)


def _is_repeated(history: History) -> bool:
    """Return whether the last two failures are the same one, even if a snapshot was taken between them."""
    if len(history.recoveries) < 2:
        return False
    before, now = history.recoveries[-2:]
    return (before.signature, before.train_call, before.step) == (now.signature, now.train_call, now.step)
