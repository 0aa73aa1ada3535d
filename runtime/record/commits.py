"""When a step is committed: all ranks have voted after its optimizer step. Pure; called by the supervisor at each look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.watchdog.observation import Slot


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The newest step that every rank is known to have voted on, and when the last of them did (monotonic)."""

    train_call: int
    step: int
    resumed_step: int
    target_steps: int
    voted_at_seconds: float


def newest_commit(slots: Mapping[int, Slot | None], world_size: int) -> Commit | None:
    """Read it off the board; None while a rank cannot be read, or ranks are in different `train()` calls.

    Args:
        slots: this node's ranks.
        world_size: ranks of all nodes.
    """
    readings = [slot for slot in slots.values() if slot is not None]
    if len(readings) < len(slots) or not readings:
        return None
    call = min(slot.train_call for slot in readings)
    if any(slot.train_call != call for slot in readings) or call == 0:
        return None
    # with every rank on this board a vote begun by all is a step committed; else wait to be told by the vote
    everywhere = len(readings) == world_size
    return Commit(
        train_call=call,
        step=min(slot.voted_step for slot in readings)
        if everywhere
        else max(slot.committed_step for slot in readings),
        resumed_step=readings[0].resumed_step,
        target_steps=readings[0].target_steps,
        voted_at_seconds=max(slot.voted_at_seconds for slot in readings),
    )
