"""The closed list of metrics: name, kind, help, unit, labels and how each reads from an observation.

The collector exports exactly these, and the generated dashboard and alert rules may ask for nothing else.
Three rules hold for all of them: labels come from closed sets (causes, actions, phases, states) or count
the local ranks; what could not be observed has no series, except `grpo_rank_observable` and
`grpo_observation_failed`, which say so; counters start at 0, because Prometheus does not see an increase
in a series' first sample. Reads no file and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

from grpo_run.dashboards.metrics.metric import RUN_ID, Exporter, Label, Metric, Observation, Sample, one_hot
from grpo_run.runtime.record.history import Recovery
from grpo_run.runtime.supervision import policy
from grpo_run.runtime.supervision.lifecycle import State
from grpo_run.runtime.supervision.policy import Action
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState, Slot

UNKNOWN = "unknown"
UNDECIDED = "undecided"
RUN_STATES = (*(state.value for state in State), UNKNOWN)
PHASES = tuple(phase.name for phase in Phase)
RANK_STATES = tuple(state.name for state in RankState if state is not RankState.absent)
CAUSES = tuple(cause.value for cause in Cause)
RESTARTS = tuple(action.value for action in Action if action in policy.RESTARTS)
ACTIONS = (*(action.value for action in Action), UNDECIDED)

RANK = Label(name="rank", values=None)
RUN_STATE = Label(name="state", values=RUN_STATES)
RANK_STATE = Label(name="state", values=RANK_STATES)
PHASE = Label(name="phase", values=PHASES)
CAUSE = Label(name="cause", values=CAUSES)
RESTART = Label(name="action", values=RESTARTS)
LAST_CAUSE = Label(name="cause", values=CAUSES, exclusive=True)
LAST_ACTION = Label(name="action", values=ACTIONS, exclusive=True)
CULPRIT = Label(name="culprit", values=None, exclusive=True)
VERSION = Label(name="version", values=None, exclusive=True)


@cache
def _version() -> str:
    return version("grpo-run")


def _cause(recovery: Recovery) -> str:
    return recovery.cause if recovery.cause in CAUSES else Cause.unknown.value


def _action(recovery: Recovery) -> str:
    return recovery.action if recovery.action in ACTIONS else UNDECIDED


def _one(value: Callable[[Observation], float | None]) -> Callable[[Observation], Iterator[Sample]]:
    def read(seen: Observation) -> Iterator[Sample]:
        yield (), value(seen)

    return read


def _each_rank(value: Callable[[Observation, Slot], float]) -> Callable[[Observation], Iterator[Sample]]:
    def read(seen: Observation) -> Iterator[Sample]:
        for rank, slot in seen.readable():
            yield (rank,), value(seen, slot)

    return read


def _run_info(seen: Observation) -> Iterator[Sample]:
    yield (_version(),), 1.0


def _run_state(seen: Observation) -> Iterator[Sample]:
    present = seen.status.state if seen.status.state in RUN_STATES else UNKNOWN
    for state, value in one_hot(RUN_STATES, present):
        yield (state,), value


def _goodput(seen: Observation) -> float | None:
    return seen.status.history.goodput(seen.wall_seconds if seen.status.supervisor_pid else None)


def _checkpoint_step(seen: Observation) -> float | None:
    checkpoint = seen.status.history.checkpoint
    return None if checkpoint is None else float(checkpoint.step)


def _snapshot_step(seen: Observation) -> float | None:
    step = seen.status.history.snapshot_step
    return None if step is None else float(step)


def _checkpoint_trouble(seen: Observation) -> float:
    return float(seen.status.history.checkpoint_trouble is not None)


def _checkpoint_verified(seen: Observation) -> float | None:
    checkpoint = seen.status.history.checkpoint
    return None if checkpoint is None else float(checkpoint.verified)


def _incidents(seen: Observation) -> Iterator[Sample]:
    counts = Counter(_cause(recovery) for recovery in seen.status.history.recoveries)
    for cause in CAUSES:
        yield (cause,), float(counts[cause])


def _restarts(seen: Observation) -> Iterator[Sample]:
    counts = Counter((_cause(recovery), _action(recovery)) for recovery in seen.status.history.recoveries)
    for cause in CAUSES:
        for action in RESTARTS:
            yield (cause, action), float(counts[cause, action])


def _last_incident(seen: Observation) -> Iterator[Sample]:
    for recovery in seen.status.history.recoveries[-1:]:
        culprit = "none" if recovery.rank is None else str(recovery.rank)
        yield (_cause(recovery), _action(recovery), culprit), 1.0


def _lost_steps(seen: Observation) -> float:
    return float(sum(recovery.lost_steps or 0 for recovery in seen.status.history.recoveries))


def _last_known(field: Callable[[Recovery], float | None]) -> Callable[[Observation], Iterator[Sample]]:
    def value(seen: Observation) -> float | None:
        known = (field(recovery) for recovery in reversed(seen.status.history.recoveries))
        return next((seconds for seconds in known if seconds is not None), None)

    return _one(value)


def _rank_observable(seen: Observation) -> Iterator[Sample]:
    for rank, slot in seen.ranks():
        yield (rank,), float(slot is not None)


def _rank_phase(seen: Observation) -> Iterator[Sample]:
    for rank, slot in seen.readable():
        for phase, value in one_hot(PHASES, None if slot.phase is None else slot.phase.name):
            yield (rank, phase), value


def _rank_phase_age(seen: Observation) -> Iterator[Sample]:
    for rank, slot in seen.readable():
        if slot.phases:
            yield (rank,), max(0.0, seen.monotonic_seconds - slot.phases[-1].since_seconds)


def _rank_state(seen: Observation) -> Iterator[Sample]:
    for rank, slot in seen.readable():
        for state, value in one_hot(RANK_STATES, slot.state.name):
            yield (rank, state), value


def _exporter(value: Callable[[Exporter], float | None]) -> Callable[[Exporter], Iterator[Sample]]:
    def read(exporter: Exporter) -> Iterator[Sample]:
        yield (), value(exporter)

    return read


RUN_METRICS: tuple[Metric[Observation], ...] = (
    Metric(
        name="grpo_run_info", kind="gauge", unit="", labels=(VERSION,), read=_run_info,
        help="Always 1; carries the run's id and the version of grpo-run that watches it.",
    ),
    Metric(
        name="grpo_run_state", kind="gauge", unit="boolean", labels=(RUN_STATE,), read=_run_state,
        help="1 for the run's present lifecycle state, 0 for the others; unknown when nobody can say.",
    ),
    Metric(
        name="grpo_supervisor_up", kind="gauge", unit="boolean",
        read=_one(lambda seen: float(seen.status.supervisor_pid is not None)),
        help="Whether a live supervisor holds the run.",
    ),
    Metric(
        name="grpo_step", kind="gauge", unit="steps", read=_one(lambda seen: float(seen.status.history.step)),
        help="Last optimizer step that every rank voted on, in the present train() call.",
    ),
    Metric(
        name="grpo_target_steps", kind="gauge", unit="steps",
        read=_one(lambda seen: float(seen.status.history.target_steps or 0) or None),
        help="Optimizer steps the present train() call is to make; absent until it is known.",
    ),
    Metric(
        name="grpo_attempts_total", kind="counter", unit="count",
        read=_one(lambda seen: float(seen.status.history.attempts)),
        help="Times the ranks were started; 1 in a run that was never hurt.",
    ),
    Metric(
        name="grpo_goodput", kind="gauge", unit="ratio", read=_one(_goodput),
        help="Share of wall time spent on steps that count, 0 to 1.",
    ),
    Metric(
        name="grpo_checkpoint_step", kind="gauge", unit="steps", read=_one(_checkpoint_step),
        help="Step of the last published checkpoint; absent before the first.",
    ),
    Metric(
        name="grpo_snapshot_step", kind="gauge", unit="steps", read=_one(_snapshot_step),
        help="Step of the newest snapshot in memory; absent before the first.",
    ),
    Metric(
        name="grpo_checkpoint_trouble", kind="gauge", unit="boolean", read=_one(_checkpoint_trouble),
        help="1 while the disk does not take checkpoints (full, or not moving), 0 while it does.",
    ),
    Metric(
        name="grpo_journal_lost_total", kind="counter", unit="count", read=_one(lambda seen: float(seen.status.journal_lost)),
        help="Writes of the supervisor's to its journal that the disk did not take: journal and evidence are incomplete.",
    ),
    Metric(
        name="grpo_checkpoint_verified", kind="gauge", unit="boolean", read=_one(_checkpoint_verified),
        help="Whether the last published checkpoint was read back and matched its manifest.",
    ),
    Metric(
        name="grpo_incidents_total", kind="counter", unit="count", labels=(CAUSE,), read=_incidents,
        help="Established faults by cause.",
    ),
    Metric(
        name="grpo_restarts_total", kind="counter", unit="count", labels=(CAUSE, RESTART), read=_restarts,
        help="Faults answered with a new attempt, by cause and by the kind of restart.",
    ),
    Metric(
        name="grpo_last_incident_info", kind="gauge", unit="", read=_last_incident,
        labels=(LAST_CAUSE, LAST_ACTION, CULPRIT),
        help="Always 1; the last fault's cause, the action taken and the one culprit rank or none.",
    ),
    Metric(
        name="grpo_lost_steps_total", kind="counter", unit="steps", read=_one(_lost_steps),
        help="Committed steps that recoveries had to do again.",
    ),
    Metric(
        name="grpo_last_detection_seconds", kind="gauge", unit="seconds",
        read=_last_known(lambda recovery: recovery.detection_seconds),
        help="From the last fault to its being established.",
    ),
    Metric(
        name="grpo_last_recovery_seconds", kind="gauge", unit="seconds",
        read=_last_known(lambda recovery: recovery.recovery_seconds),
        help="From the last recovered fault to the first step committed after it.",
    ),
    Metric(
        name="grpo_failures_without_progress", kind="gauge", unit="count",
        read=_one(lambda seen: float(seen.status.history.failures_without_progress)),
        help="Faults since a checkpoint last reached a new highest step; what the restart budget counts.",
    ),
    Metric(
        name="grpo_warnings_total", kind="counter", unit="count",
        read=_one(lambda seen: float(seen.status.history.warnings)),
        help="Warnings in the journal.",
    ),
    Metric(
        name="grpo_reward", kind="gauge", unit="", read=_one(lambda seen: seen.status.history.reward),
        help="Mean reward the run last logged.",
    ),
    Metric(
        name="grpo_rank_observable", kind="gauge", unit="boolean", labels=(RANK,), read=_rank_observable,
        help="1 when the rank's slot could be read, 0 when nothing is known about the rank.",
    ),
    Metric(
        name="grpo_rank_watch_blind", kind="gauge", unit="boolean", labels=(RANK,),
        read=_each_rank(lambda seen, slot: float(slot.rank in seen.status.blind)),
        help="1 when the watchdog's last look at the rank's collective records failed: a hang may go unproved.",
    ),
    Metric(
        name="grpo_rank_state", kind="gauge", unit="boolean", labels=(RANK, RANK_STATE), read=_rank_state,
        help="1 for how far the rank's script has come, 0 for the others.",
    ),
    Metric(
        name="grpo_rank_phase", kind="gauge", unit="boolean", labels=(RANK, PHASE), read=_rank_phase,
        help="1 for the rank's innermost open phase, 0 for the others.",
    ),
    Metric(
        name="grpo_rank_phase_age_seconds", kind="gauge", unit="seconds", labels=(RANK,), read=_rank_phase_age,
        help="Time since the rank's innermost phase was opened.",
    ),
    Metric(
        name="grpo_rank_last_progress_age_seconds", kind="gauge", unit="seconds", labels=(RANK,),
        read=_each_rank(lambda seen, slot: max(0.0, seen.monotonic_seconds - slot.last_progress_seconds)),
        help="Time since the rank last wrote its slot: a phase, a vote, a batch of rewards or tokens.",
    ),
    Metric(
        name="grpo_rank_voted_step", kind="gauge", unit="steps", labels=(RANK,),
        read=_each_rank(lambda seen, slot: float(slot.voted_step)),
        help="Last step this rank voted on; the rank that lags is the one the others wait for.",
    ),
    Metric(
        name="grpo_rank_tokens_generated_total", kind="counter", unit="tokens", labels=(RANK,),
        read=_each_rank(lambda seen, slot: float(slot.tokens_generated)),
        help="Completion tokens generated in this attempt.",
    ),
    Metric(
        name="grpo_rank_rewards_scored_total", kind="counter", unit="count", labels=(RANK,),
        read=_each_rank(lambda seen, slot: float(slot.rewards_scored)),
        help="Completions scored in this attempt.",
    ),
    Metric(
        name="grpo_rank_votes_total", kind="counter", unit="count", labels=(RANK,),
        read=_each_rank(lambda seen, slot: float(slot.votes)),
        help="Votes this rank took part in, in this attempt.",
    ),
    Metric(
        name="grpo_rank_vote_wait_seconds_total", kind="counter", unit="seconds", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.vote_wait_seconds),
        help="Time this rank waited for the others in votes, in this attempt.",
    ),
    Metric(
        name="grpo_rank_hygiene_runs_total", kind="counter", unit="count", labels=(RANK,),
        read=_each_rank(lambda seen, slot: float(slot.hygiene_runs)),
        help="Memory hygiene runs in this attempt.",
    ),
    Metric(
        name="grpo_rank_hygiene_seconds_total", kind="counter", unit="seconds", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.hygiene_seconds),
        help="Time spent on memory hygiene in this attempt.",
    ),
    Metric(
        name="grpo_rank_reward", kind="gauge", unit="", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.reward),
        help="Mean reward the rank last reported.",
    ),
    Metric(
        name="grpo_rank_completion_length", kind="gauge", unit="tokens", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.completion_length),
        help="Mean completion length the rank last reported, in tokens.",
    ),
    Metric(
        name="grpo_rank_loss", kind="gauge", unit="", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.loss),
        help="Loss the rank last reported.",
    ),
    Metric(
        name="grpo_rank_grad_norm", kind="gauge", unit="", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.grad_norm),
        help="Gradient norm the rank last reported.",
    ),
    Metric(
        name="grpo_rank_learning_rate", kind="gauge", unit="", labels=(RANK,),
        read=_each_rank(lambda seen, slot: slot.learning_rate),
        help="Learning rate the rank last reported.",
    ),
)  # fmt: skip
"""What is read from a run. Absent, all of it, when the run could not be observed."""

EXPORTER_METRICS: tuple[Metric[Exporter], ...] = (
    Metric(
        name="grpo_observation_failed", kind="gauge", unit="boolean",
        read=_exporter(lambda exporter: float(exporter.failed)),
        help="1 when the run could not be read for this scrape: every other value of the run is then absent.",
    ),
    Metric(
        name="grpo_observation_failures_total", kind="counter", unit="count",
        read=_exporter(lambda exporter: float(exporter.failures)),
        help="Readings of the run that failed since the exporter was started.",
    ),
    Metric(
        name="grpo_observation_timestamp_seconds", kind="gauge", unit="seconds",
        read=_exporter(lambda exporter: exporter.observed_at),
        help="Unix time of the last good reading of the run; absent before the first.",
    ),
)  # fmt: skip
"""What the exporter says of itself; always exported."""

ALL_METRICS: tuple[Metric[Any], ...] = (*RUN_METRICS, *EXPORTER_METRICS)

LABELS: dict[str, frozenset[str]] = {
    metric.name: frozenset({*metric.label_names, RUN_ID}) for metric in ALL_METRICS
}
"""Every metric's name and labels: what a query may ask for."""
