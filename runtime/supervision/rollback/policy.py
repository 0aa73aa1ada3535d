"""The decision after a learning guard has ended the attempt. Pure; called by `policy.py`.

A resumed run is exact, so going back repeats what happened, unless it was transient: a bit that flipped, a value that a
service returned. The first trip is therefore answered by an exact repetition from before the onset, the second one at
about the same place by one with fresh sampling seeds, and the third one ends the run.
"""

from __future__ import annotations

from grpo_run.runtime.continuity.decision import Action, Decision
from grpo_run.runtime.continuity.recovery import Recovery
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.record.history import History
from grpo_run.watchdog.learning.alarm import Trip
from grpo_run.watchdog.learning.rules import Guard, Response

SAME_PLACE_STEPS = 20
"""A trip of the same guard up to this many steps after the last one belongs to the same collapse: fresh samples may
delay it."""
LEAD_STEPS = 2
"""How long before the first bad reward the samples may have been what broke the weights. A gradient that is not finite
belongs to the samples of its own step."""


def decide_trip(history: History, trip: Trip, budget: Budget, *, can_go_back: bool) -> Decision:
    """Return what follows.

    Args:
        history: contains this incident as its last recovery.
        trip: of the guard.
        budget: a run that may not restart is not rolled back either.
        can_go_back: something is left to resume from before the onset, or nothing is saved at all.
    """
    if trip.response is Response.stop:
        return Decision(action=Action.stop, reason=f"the guard {trip.guard} is set to stop")
    if history.failures_without_progress > budget.failures_without_progress:
        limit = budget.failures_without_progress
        return Decision(
            action=Action.stop,
            reason=f"{history.failures_without_progress} failures in a row without a newer checkpoint (budget {limit})",
        )
    if not can_go_back:
        return Decision(
            action=Action.stop, reason=f"no checkpoint from before the onset at step {trip.onset} is left"
        )
    call = history.recoveries[-1].train_call
    before = _earlier_trips(history, trip, call)
    if not before:
        return Decision(
            action=Action.restart_from_earlier_checkpoint,
            reason=f"repeats the steps from before step {trip.onset} exactly, in case it was transient",
            before_step=trip.onset,
        )
    if any(one.fresh_from is not None for one in before):
        return Decision(
            action=Action.stop,
            reason=f"the guard {trip.guard} has tripped again after an exact repetition and after one with fresh samples",
        )
    lead = 0 if trip.guard is Guard.nonfinite else LEAD_STEPS
    fresh_from = max(1, trip.onset - lead)
    return Decision(
        action=Action.restart_from_earlier_checkpoint,
        reason=f"the exact repetition ended the same way; repeats with fresh sampling seeds from step {fresh_from} on",
        before_step=trip.onset,
        fresh_from=fresh_from,
    )


def _earlier_trips(history: History, trip: Trip, call: int) -> list[Recovery]:
    """Return the rollbacks because of the same collapse, newest first."""
    found: list[Recovery] = []
    step = trip.step
    for recovery in reversed(history.recoveries[:-1]):
        if recovery.guard is None:
            continue  # another fault during the repetition
        if (
            recovery.guard != trip.guard
            or recovery.train_call != call
            or step > recovery.step + SAME_PLACE_STEPS
        ):
            break
        found.append(recovery)
        step = recovery.step
    return found
