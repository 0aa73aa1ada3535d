"""The metrics of the learning guards."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_run.runtime.features.learning_guards.events import GuardTrips
from grpo_run.runtime.features.learning_guards.settings import LearningGuard
from grpo_run.runtime.metrics import Label, Metric, RunObservation, Sample, run_value

GUARD = Label(name="guard", values=tuple(guard.value for guard in LearningGuard))


def guard_trips(observation: RunObservation) -> Iterator[Sample]:
    """How often each learning guard has tripped."""
    counts = observation.status.history.part(GuardTrips).counts
    for guard in LearningGuard:
        yield (guard.value,), float(counts[guard.value])


METRICS = (
    Metric(
        name="grpo_nonfinite_total", kind="counter", unit="count",
        read=run_value(lambda run: float(run.status.history.part(GuardTrips).nonfinite_refused)),
        help="How often a step was refused because its loss or gradient was not finite.",
    ),
    Metric(
        name="grpo_guard_trips_total", kind="counter", unit="count", labels=(GUARD,), read=guard_trips,
        help="How often each learning guard has tripped, whatever followed.",
    ),
)  # fmt: skip
