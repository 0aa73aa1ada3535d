"""Committed steps: a step is committed when all ranks have voted after its optimizer step.

Pure. Called by the supervisor at each poll.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_run.watchdog.observation import Slot


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The newest step that every rank has voted on.

    Args:
        train_call: ordinal of its `train()` call.
        step: the committed step.
        resumed_step: the step that the call resumed from.
        target_steps: number of steps of the call.
        voted_at_seconds: when the last rank voted, on the monotonic clock.
    """

    train_call: int
    step: int
    resumed_step: int
    target_steps: int
    voted_at_seconds: float

    def as_event(self, *, wall_time: float, now_seconds: float) -> dict[str, Any]:
        """Return the fields of its journal event.

        Args:
            wall_time: now, in seconds since the epoch.
            now_seconds: now, on the monotonic clock.
        """
        return {
            "step": self.step,
            "train_call": self.train_call,
            "target_steps": self.target_steps,
            "committed_at": wall_time - (now_seconds - self.voted_at_seconds),
        }


def newest_commit(slots: Mapping[int, Slot | None], world_size: int) -> Commit | None:
    """Return the newest commit; None if a slot cannot be read or ranks are in different `train()` calls.

    Args:
        slots: of this node's ranks.
        world_size: number of ranks on all nodes.
    """
    readings = [slot for slot in slots.values() if slot is not None]
    if len(readings) < len(slots) or not readings:
        return None
    call = min(slot.train_call for slot in readings)
    if any(slot.train_call != call for slot in readings) or call == 0:
        return None
    # if the board shows all ranks, a vote that each has begun commits the step; otherwise only the vote's
    # result does
    complete = len(readings) == world_size
    return Commit(
        train_call=call,
        step=min(slot.voted_step for slot in readings)
        if complete
        else max(slot.committed_step for slot in readings),
        resumed_step=readings[0].resumed_step,
        target_steps=readings[0].target_steps,
        voted_at_seconds=max(slot.voted_at_seconds for slot in readings),
    )
