"""Functions that compute a metric's samples from an observation.

`catalogue.py` refers to them by name. All of them are pure: no file, no clock. A value of None is not
exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version

from grpo_run.dashboards.metrics.labels import (
    ACTIONS,
    CAUSES,
    OUTCOMES,
    PHASES,
    RANK_STATES,
    RESTART_ACTIONS,
    RUN_STATES,
    UNDECIDED,
    UNKNOWN,
)
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import WAITING_STATES
from grpo_run.runtime.history.totals import CheckpointResult
from grpo_run.runtime.metrics import Exporter, RunObservation, Sample, run_value
from grpo_run.watchdog.observation import EndReason, Phase
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Histogram


def exporter_value(value: Callable[[Exporter], float | None]) -> Callable[[Exporter], Iterator[Sample]]:
    """Read one value of the exporter itself."""

    def read(exporter: Exporter) -> Iterator[Sample]:
        yield (), value(exporter)

    return read


def one_hot(values: Sequence[str], present: str | None) -> Iterator[tuple[str, float]]:
    """Yield every value, with 1 for `present` and 0 for the others."""
    for value in values:
        yield value, float(value == present)


def run_info(observation: RunObservation) -> Iterator[Sample]:
    """The installed version of grpo-run, as a label."""
    yield (_version(),), 1.0


def run_state(observation: RunObservation) -> Iterator[Sample]:
    """The lifecycle state; a state outside the closed set counts as unknown."""
    state = observation.status.state
    for name, value in one_hot(RUN_STATES, state if state in RUN_STATES else UNKNOWN):
        yield (name,), value


def goodput(observation: RunObservation) -> float | None:
    """The goodput until now, or until the end of the run if it has no supervisor."""
    status = observation.status
    return status.history.goodput(observation.wall_seconds if status.supervisor_pid else None)


def script_checkpoint_age(observation: RunObservation) -> float | None:
    """Seconds since the script has saved its own state, or None."""
    checkpoint = observation.status.history.no_trainer.checkpoint
    return None if checkpoint is None else max(0.0, observation.wall_seconds - checkpoint.saved_at)


def checkpoint_step(observation: RunObservation) -> float | None:
    """The step of the last published checkpoint, or None."""
    checkpoint = observation.status.history.checkpoint
    return None if checkpoint is None else float(checkpoint.step)


def checkpoint_verified(observation: RunObservation) -> float | None:
    """1 if the last published checkpoint was verified, 0 if not, None if there is none."""
    checkpoint = observation.status.history.checkpoint
    return None if checkpoint is None else float(checkpoint.verified)


def snapshot_step(observation: RunObservation) -> float | None:
    """The step of the newest snapshot in memory, or None."""
    step = observation.status.history.snapshot_step
    return None if step is None else float(step)


def awaited_rank_seconds(observation: RunObservation) -> Iterator[Sample]:
    """How long a rank has been waited for; no sample while none is."""
    for awaited in _awaited(observation):
        waited = observation.monotonic_seconds - awaited.since_seconds
        yield (str(awaited.rank), awaited.phase.name), max(0.0, waited)


def awaited_rank_deadline(observation: RunObservation) -> Iterator[Sample]:
    """How long that rank may be waited for; no sample while none is."""
    for awaited in _awaited(observation):
        yield ((str(awaited.rank), awaited.phase.name), awaited.deadline_seconds)


def incidents(observation: RunObservation) -> Iterator[Sample]:
    """The number of incidents by cause."""
    counts = Counter(_cause(recovery) for recovery in observation.status.history.recoveries)
    for cause in CAUSES:
        yield (cause,), float(counts[cause])


def faults(observation: RunObservation) -> Iterator[Sample]:
    """The number of faults by cause and by what became of them."""
    counts = Counter(
        (_cause(recovery), "gave_up" if recovery.gave_up else "recovered")
        for recovery in observation.status.history.recoveries
        if recovery.gave_up or recovery.recovery_seconds is not None
    )
    for cause in CAUSES:
        for outcome in OUTCOMES:
            yield (cause, outcome), float(counts[cause, outcome])


def fault_durations(
    field: Callable[[Recovery], float | None],
) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read a duration of all faults for which it is known."""

    def value(observation: RunObservation) -> Iterator[Sample]:
        total = Histogram()
        for seconds in map(field, observation.status.history.recoveries):
            total = total if seconds is None else total.with_value(seconds)
        yield (), total

    return value


def phase_durations(observation: RunObservation) -> Iterator[Sample]:
    """The durations of phases over all ranks and attempts; no sample if the board cannot be read."""
    status = observation.status
    if not status.phases and status.history.exit_code is None:
        return
    present = [
        (slot, phases) for slot, phases in zip(status.slots, status.phases, strict=False) if slot is not None
    ]
    found = status.history.ranks.phases(present)
    for phase in Phase:
        yield (phase.name,), found.get(phase, Histogram())


def wall_seconds(observation: RunObservation) -> Iterator[Sample]:
    """The seconds of the run by what they were spent on."""
    for state, seconds in observation.status.history.wall.seconds.items():
        yield (state.value,), seconds


def checkpoints(observation: RunObservation) -> Iterator[Sample]:
    """The number of checkpoints by what became of them."""
    for result in CheckpointResult:
        yield (result.value,), float(observation.status.history.checkpoints.results[result])


def restarts(observation: RunObservation) -> Iterator[Sample]:
    """The number of restarts by cause and action."""
    recoveries = observation.status.history.recoveries
    counts = Counter((_cause(recovery), _action(recovery)) for recovery in recoveries)
    for cause in CAUSES:
        for action in RESTART_ACTIONS:
            yield (cause, action), float(counts[cause, action])


def last_incident(observation: RunObservation) -> Iterator[Sample]:
    """Cause, action and culprit of the last incident, as labels; no sample before the first incident."""
    for recovery in observation.status.history.recoveries[-1:]:
        culprit = "none" if recovery.rank is None else str(recovery.rank)
        yield (_cause(recovery), _action(recovery), culprit), 1.0


def lost_steps(observation: RunObservation) -> float:
    """The number of committed steps that recoveries repeated."""
    return float(sum(recovery.lost_steps or 0 for recovery in observation.status.history.recoveries))


def reward_calls(observation: RunObservation) -> Iterator[Sample]:
    """The number of calls of each reward function."""
    for function, (calls, _) in observation.status.history.rewards.by_function().items():
        yield (function,), float(calls)


def reward_seconds(observation: RunObservation) -> Iterator[Sample]:
    """The seconds spent in calls of each reward function."""
    for function, (_, seconds) in observation.status.history.rewards.by_function().items():
        yield (function,), seconds


def reward_logged(field: str) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read `mean` or `std` of each reward function as logged last."""

    def read(observation: RunObservation) -> Iterator[Sample]:
        for function, values in observation.status.history.rewards.logged.items():
            yield (function,), values.get(field)

    return read


def last_known(field: Callable[[Recovery], float | None]) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read a field of the newest recovery for which it is known."""

    def value(observation: RunObservation) -> float | None:
        known = (field(recovery) for recovery in reversed(observation.status.history.recoveries))
        return next((seconds for seconds in known if seconds is not None), None)

    return run_value(value)


def rank_observable(observation: RunObservation) -> Iterator[Sample]:
    """Whether each known rank's slot can be read."""
    for rank, slot in observation.ranks():
        yield (rank,), float(slot is not None)


def rank_phase(observation: RunObservation) -> Iterator[Sample]:
    """The innermost open phase of each readable rank."""
    for rank, slot in observation.readable():
        for phase, value in one_hot(PHASES, None if slot.phase is None else slot.phase.name):
            yield (rank, phase), value


def rank_phase_age(observation: RunObservation) -> Iterator[Sample]:
    """Seconds since the innermost open phase began; no sample for a rank outside any phase."""
    for rank, slot in observation.readable():
        if slot.phases:
            yield (rank,), max(0.0, observation.monotonic_seconds - slot.phases[-1].since_seconds)


def rank_state(observation: RunObservation) -> Iterator[Sample]:
    """The state of each readable rank."""
    for rank, slot in observation.readable():
        for state, value in one_hot(RANK_STATES, slot.state.name):
            yield (rank, state), value


def completions_ended(observation: RunObservation) -> Iterator[Sample]:
    """The completions of each readable rank by why they ended."""
    totals = observation.status.history.ranks
    for rank, slot in observation.readable():
        for reason in EndReason:
            name = f"ended_{reason.value}"
            yield (rank, reason.value), totals.total(slot.rank, slot.attempt, name, slot.ended(reason))


@cache
def _version() -> str:
    return version("grpo-run")


def _awaited(observation: RunObservation) -> Iterator[AwaitedRank]:
    status = observation.status
    if status.awaited is not None and status.state in WAITING_STATES:
        yield status.awaited


def _cause(recovery: Recovery) -> str:
    return recovery.cause if recovery.cause in CAUSES else UNKNOWN


def _action(recovery: Recovery) -> str:
    return recovery.action if recovery.action in ACTIONS else UNDECIDED
