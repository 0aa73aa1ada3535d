"""Learning guards in the supervisor: what follows a trip that has ended an attempt, and who samples anew.

A resumed run is exact, so going back repeats what happened unless it was transient. The first trip is
answered by an exact repetition from before the onset, the second at about the same place by one with fresh
sampling seeds, and the third ends the run. The core bounds the answer by the restart budget and by what is
left to go back to (`runtime/supervisor/policy.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_run.runtime.features.learning_guards._judge import Trip
from grpo_run.runtime.features.learning_guards.events import LearningGuardTripped
from grpo_run.runtime.features.learning_guards.settings import (
    FreshSeeds,
    GuardResponse,
    LearningGuard,
    LearningGuardSettings,
    RankGuards,
)
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision, Recovery
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault, FeatureFactory, SupervisorFeature
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.json_values import from_json, to_json

SAME_PLACE_STEPS = 20
"""A trip of the same guard up to this many steps after the last one belongs to the same collapse: fresh
samples may delay it."""
LEAD_STEPS = 2
"""How long before the first bad reward the samples may have been what broke the weights. A gradient that is
not finite belongs to the samples of its own step."""


def decide_trip(history: History, trip: Trip) -> Decision:
    """Return what follows a trip that has ended an attempt.

    Args:
        history: contains this incident as its last recovery.
        trip: of the guard.
    """
    if trip.response is GuardResponse.stop:
        return _stop(f"the guard {trip.guard} is set to stop")
    call = history.recoveries[-1].train_call
    before = _earlier_trips(history, trip, call)
    if not before:
        return Decision(
            action=Action.restart_from_earlier_checkpoint,
            reason=f"repeats the steps from before step {trip.onset} exactly, in case it was transient",
            before_step=trip.onset,
        )
    if any(one.fresh_from is not None for one in before):
        return _stop(
            f"the guard {trip.guard} has tripped again after an exact repetition and after one with fresh"
            " samples"
        )
    lead = 0 if trip.guard is LearningGuard.nonfinite else LEAD_STEPS
    fresh_from = max(1, trip.onset - lead)
    return Decision(
        action=Action.restart_from_earlier_checkpoint,
        reason=(
            "the exact repetition ended the same way; repeats with fresh sampling seeds from step"
            f" {fresh_from} on"
        ),
        before_step=trip.onset,
        fresh_from=fresh_from,
    )


def _stop(reason: str) -> Decision:
    return Decision(action=Action.stop, reason=reason)


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


def orders_of(recoveries: Sequence[Recovery]) -> tuple[FreshSeeds, ...]:
    """Return the orders to sample anew of a run, oldest first."""
    return tuple(
        FreshSeeds(number=number, train_call=recovery.train_call, step=recovery.fresh_from)
        for number, recovery in enumerate(recoveries, start=1)
        if recovery.fresh_from is not None
    )


class RunGuards(SupervisorFeature):
    """The learning guards of a run."""

    name = LearningGuardSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._history = history
        self._reporter = reporter

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return from which steps on a rank samples anew."""
        settings = RankGuards(fresh_seeds=orders_of(self._history.recoveries))
        return settings.model_dump(mode="json")

    def answer(self, fault: Fault) -> Answer | None:
        """Journal a trip that has ended the attempt, and answer it."""
        alarm = fault.verdict.alarm
        if alarm is None or alarm.cause not in (Cause.nonfinite, Cause.learning_collapse):
            return None
        trip = from_json(Trip, alarm.details)
        self._reporter.write(LearningGuardTripped(**to_json(trip)))
        return Answer(decision=decide_trip(self._history, trip))


PART: FeatureFactory = RunGuards
