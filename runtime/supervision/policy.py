"""What follows a failure: start again, or give up. Pure: (history, verdict, budget) to a decision.

The budget counts failures since the run's highest checkpoint last rose, so a run that moves is never given up
for the number of its faults, and one that does not move is not kept up all night. A failure that is certain
to repeat (the same error at the same line and step, with no newer checkpoint between) is not tried a third
time, and a script that fails before its first step is tried again only if it once got further.
Called by the supervisor. Does not act.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.record.history import History
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Verdict


class Action(str, Enum):
    """What can be done about an incident."""

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
    """An action and the reason a person reads."""

    action: Action
    reason: str


def decide(history: History, verdict: Verdict, budget: Budget, *, stopping: bool) -> Decision:
    """What to do about the latest incident.

    Args:
        history: the fold, with this incident already in it as the last recovery.
        verdict: of this incident.
        stopping: a stop had been asked for; then nothing is started again.
    """
    if stopping:
        return Decision(action=Action.stop, reason="a stop was asked for")
    if verdict.cause is Cause.startup_failure and verdict.deterministic and history.best_position == (0, 0):
        return Decision(
            action=Action.stop, reason="the script failed before its first step; a restart would repeat it"
        )
    failures = history.failures_without_progress
    earlier = (
        history.recoveries[-failures:-1] if failures else []
    )  # since the last progress, without this one
    same = [recovery for recovery in earlier if recovery.signature == verdict.signature]
    if verdict.deterministic and (same or _is_repeated(history)):
        return Decision(action=Action.stop, reason="the same failure at the same step again")
    if failures > budget.failures_without_progress:
        return Decision(
            action=Action.stop,
            reason=f"{failures} failures in a row without a newer checkpoint (budget {budget.failures_without_progress})",
        )
    return Decision(action=Action.restart, reason="from the newest complete checkpoint")


def _is_repeated(history: History) -> bool:
    """The last failure is the one before over again: a snapshot taken on the way to the same step is no progress."""
    if len(history.recoveries) < 2:
        return False
    before, now = history.recoveries[-2:]
    return (before.signature, before.train_call, before.step) == (now.signature, now.train_call, now.step)
