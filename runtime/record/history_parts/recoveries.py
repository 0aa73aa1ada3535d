"""Update the list of a run's recoveries from journal events, and read the current state from it.

Called by `history.py`. An incident adds a recovery; the decision, the resumption and the next step complete it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_run.runtime.continuity.decision import Action
from grpo_run.runtime.continuity.recovery import Recovery


def apply_action(recoveries: Sequence[Recovery], record: Mapping[str, Any]) -> bool:
    """Apply the decision on the last fault; return whether the fault does not count against the restart budget."""
    if not recoveries or recoveries[-1].action:
        return False
    last = recoveries[-1]
    last.action, last.reason = record["action"], record.get("reason") or ""
    last.before_step, last.fresh_from = record.get("before_step"), record.get("fresh_from")
    last.patient = bool(record.get("patient"))
    # bounded by time, or by the ladder's length
    return last.patient or last.action == Action.restart_with_plan_change


def apply_resumed(recoveries: Iterable[Recovery], call: int, step: int) -> None:
    """Note from where the attempt after each open recovery resumes, and how many steps it repeats.

    Args:
        call: the number of the `train()` call that begins or resumes.
        step: after which it resumes.
    """
    for recovery in recoveries:
        if recovery.lost_steps is None:
            recovery.from_checkpoint = step if recovery.train_call == call else None
            # resumed in the same call, or in an earlier one if this call had no checkpoint yet
            recovery.lost_steps = max(0, recovery.step - (step if recovery.train_call == call else 0))


def apply_progress(recoveries: Iterable[Recovery], at: float) -> None:
    """Complete open recoveries: a step was committed at this time, in seconds since the epoch."""
    for recovery in recoveries:
        if recovery.recovery_seconds is None and recovery.action not in ("stop", "checkpoint_and_stop"):
            recovery.recovery_seconds = max(0.0, at - recovery.at)


def apply_mismatch(recoveries: Sequence[Recovery], text: str) -> None:
    """Note how the attempt after the last fault did not continue what the run has."""
    if recoveries and not recoveries[-1].mismatch:
        recoveries[-1].mismatch = text


def is_restarting(recoveries: Sequence[Recovery]) -> bool:
    """Whether the last fault was answered by a restart after which no step has been committed yet."""
    last = recoveries[-1] if recoveries else None
    return last is not None and last.action.startswith("restart") and last.recovery_seconds is None
