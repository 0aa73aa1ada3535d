"""The metrics of the learning guards."""

from __future__ import annotations

from grpo_run.runtime.features.learning_guards.events import GuardTrips
from grpo_run.runtime.features.learning_guards.settings import LearningGuard
from grpo_run.runtime.metrics import Metric, RunObservation, Values, counter


def guard_trips(run: RunObservation) -> Values:
    """How often each learning guard has tripped."""
    counts = run.history.part(GuardTrips).counts
    return {guard.value: counts[guard.value] for guard in LearningGuard}


METRICS: tuple[Metric[RunObservation], ...] = (
    counter("grpo_nonfinite_total", "count", lambda run: run.history.part(GuardTrips).nonfinite_refused,
            "How often a step was refused because its loss or gradient was not finite."),
    counter("grpo_guard_trips_total", "count", guard_trips,
            "How often each learning guard has tripped, whatever followed.", "guard"),
)  # fmt: skip
