"""The table of the core's metrics: name, unit, how each is read, help text and labels.

Those of features, in their modules `metrics`, follow. What ranks publish as a number is listed in
`watchdog/rank_metrics.py` and only taken over here. The collector exports exactly these metrics; dashboards
and alert rules may query no others. Three rules hold for all of them. Label values come from closed sets or
are local ranks; causes and actions are among them only if the code can produce them. A value that cannot be
observed is not exported; `grpo_rank_observable` and `grpo_observation_failed` report this condition. Counters
start at 0, because Prometheus does not count an increase in a series' first sample. The functions that read
are pure: no file, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

from grpo_run.dashboards.metrics._collectives import COLLECTIVE_METRICS
from grpo_run.dashboards.metrics._gpus import GPU_METRICS
from grpo_run.dashboards.metrics._memory import HOST_MEMORY_METRICS, MEMORY_METRICS
from grpo_run.runtime.features import modules, shown
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.recovery import Action, Recovery
from grpo_run.runtime.history.status import WAITING_STATES
from grpo_run.runtime.history.totals import CheckpointResult
from grpo_run.runtime.metrics import (
    Exporter,
    Metric,
    RunObservation,
    Values,
    by_rank,
    counted_by_rank,
    counter,
    gauge,
    histogram,
)
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import EndReason, Phase, RankState
from grpo_run.watchdog.rank_metrics import TABLE, RankMetric
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Histogram

UNKNOWN = "unknown"
UNDECIDED = "undecided"

RUN_STATES = (*(state.value for state in RunState), UNKNOWN)
PHASES = tuple(phase.name for phase in Phase)
RANK_STATES = tuple(state.name for state in RankState if state is not RankState.absent)

NO_VERDICT = (Cause.disk_full, Cause.checkpoint_corrupt)
"""The causes that no verdict has yet; they are not exported."""
INCIDENT_CAUSES = tuple(cause for cause in Cause if cause not in NO_VERDICT)

DECIDED_ACTIONS = (Action.restart, Action.restart_from_earlier_checkpoint, *shown("ACTIONS"), Action.stop)
"""The actions the supervisor can decide on, with those of features."""

CAUSES = tuple(cause.value for cause in INCIDENT_CAUSES)
ACTION_NAMES = tuple(map(str, DECIDED_ACTIONS))
RESTART_ACTIONS = tuple(action for action in ACTION_NAMES if action != Action.stop)
ACTIONS = (*ACTION_NAMES, UNDECIDED)

OUTCOMES = ("recovered", "gave_up")


def run_info(run: RunObservation) -> Values:
    """The installed version of grpo-run, as a label."""
    return {_version(): 1}


def run_state(run: RunObservation) -> Values:
    """The lifecycle state; a state outside the closed set counts as unknown."""
    state = run.status.state if run.status.state in RUN_STATES else UNKNOWN
    return {name: name == state for name in RUN_STATES}


def goodput(run: RunObservation) -> float | None:
    """The goodput until now, or until the end of the run if it has no supervisor."""
    return run.history.goodput(run.wall_seconds if run.status.supervisor_pid else None)


def checkpoint_step(run: RunObservation) -> float | None:
    """The step of the last published checkpoint, or None."""
    return None if run.history.checkpoint is None else run.history.checkpoint.step


def checkpoint_verified(run: RunObservation) -> float | None:
    """1 if the last published checkpoint was verified, 0 if not, None if there is none."""
    return None if run.history.checkpoint is None else run.history.checkpoint.verified


def awaited_rank(
    seconds: Callable[[RunObservation, AwaitedRank], float],
) -> Callable[[RunObservation], Values]:
    """Read a time of the rank that is waited for, by rank and phase; nothing while none is."""

    def read(run: RunObservation) -> Values:
        awaited = run.status.awaited
        if awaited is None or run.status.state not in WAITING_STATES:
            return {}
        return {(str(awaited.rank), awaited.phase.name): seconds(run, awaited)}

    return read


def incidents(run: RunObservation) -> Values:
    """The number of incidents by cause."""
    counts = Counter(map(_cause, run.history.recoveries))
    return {cause: counts[cause] for cause in CAUSES}


def faults(run: RunObservation) -> Values:
    """The number of faults by cause and by what became of them."""
    counts = Counter(
        (_cause(recovery), "gave_up" if recovery.gave_up else "recovered")
        for recovery in run.history.recoveries
        if recovery.gave_up or recovery.recovery_seconds is not None
    )
    return {(cause, outcome): counts[cause, outcome] for cause in CAUSES for outcome in OUTCOMES}


def fault_durations(field: Callable[[Recovery], float | None]) -> Callable[[RunObservation], Values]:
    """Read a duration of all faults for which it is known."""

    def read(run: RunObservation) -> Values:
        total = Histogram()
        for seconds in map(field, run.history.recoveries):
            total = total if seconds is None else total.with_value(seconds)
        return total

    return read


def phase_durations(run: RunObservation) -> Values:
    """The durations of phases over all ranks and attempts; no sample if the board cannot be read."""
    status = run.status
    if not status.phases and status.history.exit_code is None:
        return {}
    present = [
        (slot, phases) for slot, phases in zip(status.slots, status.phases, strict=False) if slot is not None
    ]
    found = status.history.ranks.phases(present)
    return {phase.name: found.get(phase, Histogram()) for phase in Phase}


def wall_seconds(run: RunObservation) -> Values:
    """The seconds of the run by what they were spent on."""
    return {state.value: seconds for state, seconds in run.history.wall.seconds.items()}


def checkpoints(run: RunObservation) -> Values:
    """The number of checkpoints by what became of them."""
    return {result.value: run.history.checkpoints.results[result] for result in CheckpointResult}


def restarts(run: RunObservation) -> Values:
    """The number of restarts by cause and action."""
    counts = Counter((_cause(recovery), _action(recovery)) for recovery in run.history.recoveries)
    return {(cause, action): counts[cause, action] for cause in CAUSES for action in RESTART_ACTIONS}


def last_incident(run: RunObservation) -> Values:
    """Cause, action and culprit of the last incident, as labels; no sample before the first incident."""
    return {
        (_cause(recovery), _action(recovery), "none" if recovery.rank is None else str(recovery.rank)): 1
        for recovery in run.history.recoveries[-1:]
    }


def lost_steps(run: RunObservation) -> float:
    """The number of committed steps that recoveries repeated."""
    return sum(recovery.lost_steps or 0 for recovery in run.history.recoveries)


def reward_calls(run: RunObservation) -> Values:
    """The number of calls of each reward function."""
    return {function: calls for function, (calls, _) in run.history.rewards.by_function().items()}


def reward_seconds(run: RunObservation) -> Values:
    """The seconds spent in calls of each reward function."""
    return {function: seconds for function, (_, seconds) in run.history.rewards.by_function().items()}


def reward_logged(field: str) -> Callable[[RunObservation], Values]:
    """Read `mean` or `std` of each reward function as logged last."""
    return lambda run: {name: values.get(field) for name, values in run.history.rewards.logged.items()}


def last_known(field: Callable[[Recovery], float | None]) -> Callable[[RunObservation], float | None]:
    """Read a field of the newest recovery for which it is known."""

    def read(run: RunObservation) -> float | None:
        known = map(field, reversed(run.history.recoveries))
        return next((seconds for seconds in known if seconds is not None), None)

    return read


def rank_observable(run: RunObservation) -> Values:
    """Whether each known rank's slot can be read."""
    return {rank: slot is not None for rank, slot in run.ranks()}


def rank_phase(run: RunObservation) -> Values:
    """The innermost open phase of each readable rank."""
    return {
        (rank, phase): slot.phase is not None and slot.phase.name == phase
        for rank, slot in run.readable()
        for phase in PHASES
    }


def rank_phase_age(run: RunObservation) -> Values:
    """Seconds since the innermost open phase began; no sample for a rank outside any phase."""
    return {
        rank: max(0.0, run.monotonic_seconds - slot.phases[-1].since_seconds)
        for rank, slot in run.readable()
        if slot.phases
    }


def rank_state(run: RunObservation) -> Values:
    """The state of each readable rank."""
    return {(rank, state): slot.state.name == state for rank, slot in run.readable() for state in RANK_STATES}


def completions_ended(run: RunObservation) -> Values:
    """The completions of each readable rank by why they ended."""
    total = run.history.ranks.total
    return {
        (rank, reason.value): total(slot.rank, slot.attempt, f"ended_{reason.value}", slot.ended(reason))
        for rank, slot in run.readable()
        for reason in EndReason
    }


@cache
def _version() -> str:
    return version("grpo-run")


def _cause(recovery: Recovery) -> str:
    return recovery.cause if recovery.cause in CAUSES else UNKNOWN


def _action(recovery: Recovery) -> str:
    return recovery.action if recovery.action in ACTIONS else UNDECIDED


def rank_metric(row: RankMetric) -> Metric[RunObservation]:
    """Return the metric of a row of the ranks' table."""
    if row.kind == "counter":
        return counter(row.name, row.unit, counted_by_rank(row.field), row.help, "rank")
    return gauge(row.name, row.unit, by_rank(lambda run, slot: slot.value(row.field)), row.help, "rank")


RUN_METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_run_info", "", run_info,
          "Always 1; the labels carry the run ID and the version of grpo-run.", "version"),
    gauge("grpo_run_state", "boolean", run_state,
          "1 for the current lifecycle state of the run, 0 for every other state.", "state"),
    gauge("grpo_supervisor_up", "boolean", lambda run: run.status.supervisor_pid is not None,
          "1 if a live supervisor manages the run, 0 otherwise."),
    gauge("grpo_step", "steps", lambda run: run.history.step,
          "Last committed optimizer step of the current train() call."),
    gauge("grpo_target_steps", "steps", lambda run: run.history.target_steps or None,
          "Total optimizer steps of the current train() call; absent until known."),
    gauge("grpo_step_seconds", "seconds", lambda run: run.history.step_seconds(),
          "Median duration of the last optimizer steps; absent until a few are committed."),
    gauge("grpo_eta_seconds", "seconds", lambda run: run.status.remaining_seconds,
          "Time until the current train() call ends at the current pace; absent while no steps are"
          " committed."),
    gauge("grpo_run_awaited_rank_seconds", "seconds",
          awaited_rank(lambda run, awaited: max(0.0, run.monotonic_seconds - awaited.since_seconds)),
          "How long the run has waited for this rank in this phase; absent while no rank is waited for.",
          "rank", "phase"),
    gauge("grpo_run_awaited_rank_deadline_seconds", "seconds",
          awaited_rank(lambda run, awaited: awaited.deadline_seconds),
          "How long the run may wait for this rank in this phase before the rank counts as hung.",
          "rank", "phase"),
    counter("grpo_attempts_total", "count", lambda run: run.history.attempts,
            "Attempts started, including the first one."),
    gauge("grpo_goodput", "ratio", goodput,
          "Fraction of wall time with a supervisor that was productive, 0 to 1."),
    counter("grpo_wall_seconds_total", "seconds", wall_seconds,
            "Wall time of the run by what it was spent on: steps committed for the first time are"
            " productive, later times redone; a second is counted when it is known what it was.", "state"),
    histogram("grpo_phase_duration_seconds", phase_durations,
              "Duration of phases of this node's ranks that have ended, over all attempts; nested phases"
              " count in both.", "phase"),
    histogram("grpo_step_duration_seconds", lambda run: run.history.steps.durations,
              "Duration of committed steps; those done again after a recovery count again."),
    gauge("grpo_checkpoint_step", "steps", checkpoint_step,
          "Step of the last published checkpoint; absent before the first one."),
    gauge("grpo_snapshot_step", "steps", lambda run: run.history.snapshot_step,
          "Step of the newest snapshot in memory; absent before the first one."),
    gauge("grpo_checkpoint_trouble", "boolean", lambda run: run.history.checkpoint_trouble is not None,
          "1 while checkpoints cannot be written because the disk is full or not responding."),
    counter("grpo_checkpoints_total", "count", checkpoints,
            "Checkpoints published on disk, failed to be written (once until one is written again), rejected"
            " because weights are not finite or files cannot be resumed from, or skipped for want of space.",
            "result"),
    histogram("grpo_checkpoint_duration_seconds", lambda run: run.history.checkpoints.durations,
              "Time to write a checkpoint to disk, of those published."),
    gauge("grpo_checkpoint_timestamp_seconds", "seconds", lambda run: run.history.checkpoints.published_at,
          "Unix time at which the last checkpoint was published; absent before the first one."),
    gauge("grpo_checkpoint_bytes", "bytes", lambda run: run.history.checkpoints.size_bytes,
          "Size of the last published checkpoint."),
    gauge("grpo_trains_without_trainer", "boolean", lambda run: run.history.no_trainer.current,
          "1 while the script trains without a Trainer or a loop: its steps are not counted, and nothing is"
          " saved."),
    counter("grpo_journal_lost_total", "count", lambda run: run.status.journal_lost,
            "Journal writes of the supervisor that failed; if above 0, journal and evidence are incomplete."),
    gauge("grpo_checkpoint_verified", "boolean", checkpoint_verified,
          "1 if the last published checkpoint was read back and matched its manifest, 0 otherwise."),
    counter("grpo_incidents_total", "count", incidents,
            "Incidents by cause.", "cause"),
    counter("grpo_faults_total", "count", faults,
            "Incidents by what became of them: a step was committed afterwards, or the run was given up.",
            "cause", "outcome"),
    histogram("grpo_detection_duration_seconds", fault_durations(lambda recovery: recovery.detection_seconds),
              "Time from a fault to its verdict."),
    histogram("grpo_recovery_duration_seconds", fault_durations(lambda recovery: recovery.recovery_seconds),
              "Time from a fault to the first step committed after it."),
    counter("grpo_restarts_total", "count", restarts,
            "Incidents that were followed by a new attempt, by cause and kind of restart.",
            "cause", "action"),
    gauge("grpo_last_incident_info", "", last_incident,
          "Always 1; the labels carry the last incident's cause, action and culprit rank (or none).",
          "cause", "action", "culprit"),
    counter("grpo_lost_steps_total", "steps", lost_steps,
            "Committed steps that were repeated after recoveries."),
    gauge("grpo_last_detection_seconds", "seconds", last_known(lambda recovery: recovery.detection_seconds),
          "Time from the last fault to its verdict."),
    gauge("grpo_last_recovery_seconds", "seconds", last_known(lambda recovery: recovery.recovery_seconds),
          "Time from the last recovered fault to the first step committed after it."),
    gauge("grpo_failures_without_progress", "count", lambda run: run.history.failures_without_progress,
          "Consecutive failures since a checkpoint last reached a new highest step; limited by"
          " --max-restarts."),
    counter("grpo_resume_mismatches_total", "count", lambda run: run.history.resume_mismatches,
            "Restarts that repeated or left out work of which the run had a checkpoint."),
    counter("grpo_reward_calls_total", "count", reward_calls,
            "Calls of each reward function over all ranks, about once per minute; further functions count as"
            " other.", "function"),
    counter("grpo_reward_seconds_total", "seconds", reward_seconds,
            "Time spent in calls of each reward function over all ranks, with failed calls and the search"
            " for their samples.", "function"),
    gauge("grpo_reward_function_mean", "", reward_logged("mean"),
          "Mean of each reward function last logged; further functions count as other, with the mean of"
          " their means.", "function"),
    gauge("grpo_reward_function_std", "", reward_logged("std"),
          "Standard deviation of each reward function last logged; other as for the mean.", "function"),
    counter("grpo_warnings_total", "count", lambda run: run.history.warnings,
            "Warnings in the journal."),
    gauge("grpo_reward", "", lambda run: run.history.reward,
          "Mean reward last logged by the run."),
    gauge("grpo_rank_observable", "boolean", rank_observable,
          "1 if the rank's slot on the board can be read, 0 if nothing is known about the rank.", "rank"),
    gauge("grpo_rank_watch_blind", "boolean", by_rank(lambda run, slot: slot.rank in run.status.blind),
          "1 if the rank's collective records could not be read at the last poll; a deadlock may not be"
          " provable.", "rank"),
    gauge("grpo_rank_state", "boolean", rank_state,
          "1 for the current state of the rank, 0 for every other state.", "rank", "state"),
    gauge("grpo_rank_phase", "boolean", rank_phase,
          "1 for the innermost open phase of the rank, 0 for every other phase.", "rank", "phase"),
    gauge("grpo_rank_phase_age_seconds", "seconds", rank_phase_age,
          "Time since the innermost open phase of the rank began.", "rank"),
    gauge("grpo_rank_last_progress_age_seconds", "seconds",
          by_rank(lambda run, slot: max(0.0, run.monotonic_seconds - slot.last_progress_seconds)),
          "Time since the rank last updated its slot: a phase change, a vote, rewards or tokens.", "rank"),
    counter("grpo_rank_completions_ended_total", "count", completions_ended,
            "Completions of the rank by why they ended, whether or not generation is limited.",
            "rank", "reason"),
    *map(rank_metric, TABLE),
    *COLLECTIVE_METRICS,
    *MEMORY_METRICS,
    *HOST_MEMORY_METRICS,
    *GPU_METRICS,
    *(metric for module in modules("metrics") for metric in module.METRICS),
)  # fmt: skip
"""Metrics read from the run. None of them is exported while the run cannot be observed."""

EXPORTER_METRICS: tuple[Metric[Exporter], ...] = (
    gauge("grpo_observation_failed", "boolean", lambda exporter: exporter.failed,
          "1 if the run could not be read for this scrape; all other metrics of the run are then absent."),
    counter("grpo_observation_failures_total", "count", lambda exporter: exporter.failures,
            "Failed reads of the run since the exporter started."),
    gauge("grpo_observation_timestamp_seconds", "seconds", lambda exporter: exporter.observed_at,
          "Unix time of the last successful read of the run; absent before the first one."),
)  # fmt: skip
"""Metrics of the exporter itself; always exported."""

ALL_METRICS: tuple[Metric[Any], ...] = (*RUN_METRICS, *EXPORTER_METRICS)
