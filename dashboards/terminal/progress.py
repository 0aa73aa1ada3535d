"""The progress line: where a run stands, in one line. Pure; called by `terminal.py`."""

from __future__ import annotations

from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.status import RunStatus

SEPARATOR = " · "
STATE_NOTES = {
    "suspect": "checking a possible hang",
    "collecting": "collecting evidence",
    "recovering": "restarting the ranks",
    "stopping": "stopping",
}
"""What the supervisor is doing, in the states in which training may stand still."""


def progress_line(status: RunStatus) -> str:
    """Return the state of the run in one line; "" before the first committed step.

    Of the newest snapshot in memory and the newest checkpoint, the newer is shown.
    """
    history = status.history
    if not history.step:
        return ""
    steps = f"step {history.step}"
    parts = [f"{steps}/{history.target_steps}" if history.target_steps else steps]
    if history.reward is not None:
        parts.append(f"reward {history.reward:.3f}")
    elif history.loss is not None:
        parts.append(f"loss {history.loss:.3f}")
    ranks = len(status.slots)
    parts.append(count(ranks, "rank"))
    parts += _recovery_point(history)
    recovered = sum(recovery.recovery_seconds is not None for recovery in history.recoveries)
    if recovered:
        parts.append(f"{count(recovered, 'fault')} recovered")
    if status.state in STATE_NOTES:
        parts.insert(0, STATE_NOTES[status.state])
    return SEPARATOR.join(parts)


def _recovery_point(history: History) -> list[str]:
    snapshot, checkpoint = history.snapshot_step, history.checkpoint
    if checkpoint is not None and checkpoint.train_call != history.train_call:
        checkpoint = None
    # a snapshot beyond the current step belongs to an earlier train() call
    if (
        snapshot is not None
        and snapshot <= history.step
        and (checkpoint is None or snapshot >= checkpoint.step)
    ):
        return [f"snapshot {snapshot}"]
    return [f"checkpoint {checkpoint.step}"] if checkpoint is not None else []


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
