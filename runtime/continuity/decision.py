"""A decision of the recovery policy: an action and its reason. Plain data; made by `policy.py` and `guard_policy.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    {
        Action.restart,
        Action.restart_from_earlier_checkpoint,
        Action.restart_with_plan_change,
        Action.quarantine_batch,
    }
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, and the reason shown to the user.

    Attributes:
        delay_seconds: wait before the restart.
        patient: the failure does not count against the restart budget.
        before_step: checkpoints of the interrupted call from this step on are set aside before the restart.
        fresh_from: the first step that uses fresh sampling seeds; None for an exact repetition.
    """

    action: Action
    reason: str
    delay_seconds: float = 0.0
    patient: bool = False
    before_step: int | None = None
    fresh_from: int | None = None
