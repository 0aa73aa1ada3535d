"""The table of the core's metrics: name, kind, unit, labels, help text, and how each is read.

Those of features, in their modules `metrics`, follow. What ranks publish as a number is listed in
`watchdog/rank_metrics.py` and only taken over here. The collector exports exactly these metrics; dashboards
and alert rules may query no others. Three rules hold for all of them. Label values come from closed sets or
are local ranks (`labels.py`). A value that cannot be observed is not exported; `grpo_rank_observable` and
`grpo_observation_failed` report this condition. Counters start at 0, because Prometheus does not count an
increase in a series' first sample. Does not read files or clocks.
"""

from __future__ import annotations

from typing import Any

from grpo_run.dashboards.metrics._collectives import COLLECTIVE_METRICS
from grpo_run.dashboards.metrics._memory import HOST_MEMORY_METRICS, MEMORY_METRICS
from grpo_run.dashboards.metrics._readings import (
    awaited_rank_deadline,
    awaited_rank_seconds,
    checkpoint_step,
    checkpoint_verified,
    checkpoints,
    completions_ended,
    exporter_value,
    fault_durations,
    faults,
    goodput,
    incidents,
    last_incident,
    last_known,
    lost_steps,
    phase_durations,
    rank_observable,
    rank_phase,
    rank_phase_age,
    rank_state,
    restarts,
    reward_calls,
    reward_logged,
    reward_seconds,
    run_info,
    run_state,
    script_checkpoint_age,
    snapshot_step,
    wall_seconds,
)
from grpo_run.dashboards.metrics.labels import (
    AWAITED_PHASE,
    AWAITED_RANK,
    CAUSE,
    CHECKPOINT_RESULT,
    CULPRIT,
    END_REASON,
    LAST_ACTION,
    LAST_CAUSE,
    OUTCOME,
    PHASE,
    RANK_STATE,
    RESTART,
    REWARD_FUNCTION,
    RUN_STATE,
    VERSION,
    WALL_STATE,
)
from grpo_run.runtime.features import modules
from grpo_run.runtime.metrics import (
    RANK,
    RUN_ID,
    Exporter,
    Metric,
    RunObservation,
    rank_total,
    rank_value,
    run_value,
)
from grpo_run.watchdog.rank_metrics import TABLE, RankMetric


def rank_metric(row: RankMetric) -> Metric[RunObservation]:
    """Return the metric of a row of the ranks' table."""
    return Metric(
        name=row.name,
        kind=row.kind,
        unit=row.unit,
        labels=(RANK,),
        help=row.help,
        read=rank_total(row.field)
        if row.kind == "counter"
        else rank_value(lambda run, slot: slot.value(row.field)),
    )


RUN_METRICS: tuple[Metric[RunObservation], ...] = (
    Metric(
        name="grpo_run_info", kind="gauge", unit="", labels=(VERSION,), read=run_info,
        help="Always 1; the labels carry the run ID and the version of grpo-run.",
    ),
    Metric(
        name="grpo_run_state", kind="gauge", unit="boolean", labels=(RUN_STATE,), read=run_state,
        help="1 for the current lifecycle state of the run, 0 for every other state.",
    ),
    Metric(
        name="grpo_supervisor_up", kind="gauge", unit="boolean",
        read=run_value(lambda run: float(run.status.supervisor_pid is not None)),
        help="1 if a live supervisor manages the run, 0 otherwise.",
    ),
    Metric(
        name="grpo_step", kind="gauge", unit="steps",
        read=run_value(lambda run: float(run.status.history.step)),
        help="Last committed optimizer step of the current train() call.",
    ),
    Metric(
        name="grpo_target_steps", kind="gauge", unit="steps",
        read=run_value(lambda run: float(run.status.history.target_steps or 0) or None),
        help="Total optimizer steps of the current train() call; absent until known.",
    ),
    Metric(
        name="grpo_step_seconds", kind="gauge", unit="seconds",
        read=run_value(lambda run: run.status.history.step_seconds()),
        help="Median duration of the last optimizer steps; absent until a few are committed.",
    ),
    Metric(
        name="grpo_eta_seconds", kind="gauge", unit="seconds",
        read=run_value(lambda run: run.status.remaining_seconds),
        help="Time until the current train() call ends at the current pace; absent while no steps"
        " are committed.",
    ),
    Metric(
        name="grpo_run_awaited_rank_seconds", kind="gauge", unit="seconds", read=awaited_rank_seconds,
        labels=(AWAITED_RANK, AWAITED_PHASE),
        help="How long the run has waited for this rank in this phase; absent while no rank is waited for.",
    ),
    Metric(
        name="grpo_run_awaited_rank_deadline_seconds", kind="gauge", unit="seconds",
        read=awaited_rank_deadline,
        labels=(AWAITED_RANK, AWAITED_PHASE),
        help="How long the run may wait for this rank in this phase before the rank counts as hung.",
    ),
    Metric(
        name="grpo_attempts_total", kind="counter", unit="count",
        read=run_value(lambda run: float(run.status.history.attempts)),
        help="Attempts started, including the first one.",
    ),
    Metric(
        name="grpo_goodput", kind="gauge", unit="ratio", read=run_value(goodput),
        help="Fraction of wall time with a supervisor that was productive, 0 to 1.",
    ),
    Metric(
        name="grpo_wall_seconds_total", kind="counter", unit="seconds", labels=(WALL_STATE,),
        read=wall_seconds,
        help="Wall time of the run by what it was spent on: steps committed for the first time are"
        " productive, later times redone; a second is counted when it is known what it was.",
    ),
    Metric(
        name="grpo_phase_duration_seconds", kind="histogram", unit="seconds", labels=(PHASE,),
        read=phase_durations,
        help="Duration of phases of this node's ranks that have ended, over all attempts; nested phases count"
        " in both.",
    ),
    Metric(
        name="grpo_step_duration_seconds", kind="histogram", unit="seconds",
        read=lambda run: iter([((), run.status.history.steps.durations)]),
        help="Duration of committed steps; those done again after a recovery count again.",
    ),
    Metric(
        name="grpo_checkpoint_step", kind="gauge", unit="steps", read=run_value(checkpoint_step),
        help="Step of the last published checkpoint; absent before the first one.",
    ),
    Metric(
        name="grpo_snapshot_step", kind="gauge", unit="steps", read=run_value(snapshot_step),
        help="Step of the newest snapshot in memory; absent before the first one.",
    ),
    Metric(
        name="grpo_checkpoint_trouble", kind="gauge", unit="boolean",
        read=run_value(lambda run: float(run.status.history.checkpoint_trouble is not None)),
        help="1 while checkpoints cannot be written because the disk is full or not responding.",
    ),
    Metric(
        name="grpo_checkpoints_total", kind="counter", unit="count", labels=(CHECKPOINT_RESULT,),
        read=checkpoints,
        help="Checkpoints published on disk, failed to be written (once until one is written again), rejected"
        " because weights are not finite or files cannot be resumed from, or skipped for want of space.",
    ),
    Metric(
        name="grpo_checkpoint_duration_seconds", kind="histogram", unit="seconds",
        read=lambda run: iter([((), run.status.history.checkpoints.durations)]),
        help="Time to write a checkpoint to disk, of those published.",
    ),
    Metric(
        name="grpo_checkpoint_timestamp_seconds", kind="gauge", unit="seconds",
        read=run_value(lambda run: run.status.history.checkpoints.published_at),
        help="Unix time at which the last checkpoint was published; absent before the first one.",
    ),
    Metric(
        name="grpo_checkpoint_bytes", kind="gauge", unit="bytes",
        read=run_value(lambda run: run.status.history.checkpoints.size_bytes),
        help="Size of the last published checkpoint.",
    ),
    Metric(
        name="grpo_trains_without_trainer", kind="gauge", unit="boolean",
        read=run_value(lambda run: float(run.status.history.no_trainer.current)),
        help="1 while the script trains without a Trainer or a loop: its steps are not counted, and"
        " nothing is saved.",
    ),
    Metric(
        name="grpo_script_checkpoint_age_seconds", kind="gauge", unit="seconds",
        read=run_value(script_checkpoint_age),
        help="Time since the script has saved its own state with Accelerator.save_state; absent before"
        " the first time.",
    ),
    Metric(
        name="grpo_journal_lost_total", kind="counter", unit="count",
        read=run_value(lambda run: float(run.status.journal_lost)),
        help="Journal writes of the supervisor that failed; if above 0, journal and evidence are incomplete.",
    ),
    Metric(
        name="grpo_checkpoint_verified", kind="gauge", unit="boolean", read=run_value(checkpoint_verified),
        help="1 if the last published checkpoint was read back and matched its manifest, 0 otherwise.",
    ),
    Metric(
        name="grpo_incidents_total", kind="counter", unit="count", labels=(CAUSE,), read=incidents,
        help="Incidents by cause.",
    ),
    Metric(
        name="grpo_faults_total", kind="counter", unit="count", labels=(CAUSE, OUTCOME), read=faults,
        help="Incidents by what became of them: a step was committed afterwards, or the run was given up.",
    ),
    Metric(
        name="grpo_detection_duration_seconds", kind="histogram", unit="seconds",
        read=fault_durations(lambda recovery: recovery.detection_seconds),
        help="Time from a fault to its verdict.",
    ),
    Metric(
        name="grpo_recovery_duration_seconds", kind="histogram", unit="seconds",
        read=fault_durations(lambda recovery: recovery.recovery_seconds),
        help="Time from a fault to the first step committed after it.",
    ),
    Metric(
        name="grpo_restarts_total", kind="counter", unit="count", labels=(CAUSE, RESTART), read=restarts,
        help="Incidents that were followed by a new attempt, by cause and kind of restart.",
    ),
    Metric(
        name="grpo_last_incident_info", kind="gauge", unit="", read=last_incident,
        labels=(LAST_CAUSE, LAST_ACTION, CULPRIT),
        help="Always 1; the labels carry the last incident's cause, action and culprit rank (or none).",
    ),
    Metric(
        name="grpo_lost_steps_total", kind="counter", unit="steps", read=run_value(lost_steps),
        help="Committed steps that were repeated after recoveries.",
    ),
    Metric(
        name="grpo_last_detection_seconds", kind="gauge", unit="seconds",
        read=last_known(lambda recovery: recovery.detection_seconds),
        help="Time from the last fault to its verdict.",
    ),
    Metric(
        name="grpo_last_recovery_seconds", kind="gauge", unit="seconds",
        read=last_known(lambda recovery: recovery.recovery_seconds),
        help="Time from the last recovered fault to the first step committed after it.",
    ),
    Metric(
        name="grpo_failures_without_progress", kind="gauge", unit="count",
        read=run_value(lambda run: float(run.status.history.failures_without_progress)),
        help="Consecutive failures since a checkpoint last reached a new highest step; limited by"
        " --max-restarts.",
    ),
    Metric(
        name="grpo_resume_mismatches_total", kind="counter", unit="count",
        read=run_value(lambda run: float(run.status.history.resume_mismatches)),
        help="Restarts that repeated or left out work of which the run had a checkpoint.",
    ),
    Metric(
        name="grpo_reward_calls_total", kind="counter", unit="count", labels=(REWARD_FUNCTION,),
        read=reward_calls,
        help="Calls of each reward function over all ranks, about once per minute; further functions"
        " count as other.",
    ),
    Metric(
        name="grpo_reward_seconds_total", kind="counter", unit="seconds", labels=(REWARD_FUNCTION,),
        read=reward_seconds,
        help="Time spent in calls of each reward function over all ranks, with failed calls and the search"
        " for their samples.",
    ),
    Metric(
        name="grpo_reward_function_mean", kind="gauge", unit="", labels=(REWARD_FUNCTION,),
        read=reward_logged("mean"),
        help="Mean of each reward function last logged; further functions count as other, with the mean of"
        " their means.",
    ),
    Metric(
        name="grpo_reward_function_std", kind="gauge", unit="", labels=(REWARD_FUNCTION,),
        read=reward_logged("std"),
        help="Standard deviation of each reward function last logged; other as for the mean.",
    ),
    Metric(
        name="grpo_warnings_total", kind="counter", unit="count",
        read=run_value(lambda run: float(run.status.history.warnings)),
        help="Warnings in the journal.",
    ),
    Metric(
        name="grpo_reward", kind="gauge", unit="", read=run_value(lambda run: run.status.history.reward),
        help="Mean reward last logged by the run.",
    ),
    Metric(
        name="grpo_rank_observable", kind="gauge", unit="boolean", labels=(RANK,), read=rank_observable,
        help="1 if the rank's slot on the board can be read, 0 if nothing is known about the rank.",
    ),
    Metric(
        name="grpo_rank_watch_blind", kind="gauge", unit="boolean", labels=(RANK,),
        read=rank_value(lambda run, slot: float(slot.rank in run.status.blind)),
        help="1 if the rank's collective records could not be read at the last poll; a deadlock may not"
        " be provable.",
    ),
    Metric(
        name="grpo_rank_state", kind="gauge", unit="boolean", labels=(RANK, RANK_STATE), read=rank_state,
        help="1 for the current state of the rank, 0 for every other state.",
    ),
    Metric(
        name="grpo_rank_phase", kind="gauge", unit="boolean", labels=(RANK, PHASE), read=rank_phase,
        help="1 for the innermost open phase of the rank, 0 for every other phase.",
    ),
    Metric(
        name="grpo_rank_phase_age_seconds", kind="gauge", unit="seconds", labels=(RANK,), read=rank_phase_age,
        help="Time since the innermost open phase of the rank began.",
    ),
    Metric(
        name="grpo_rank_last_progress_age_seconds", kind="gauge", unit="seconds", labels=(RANK,),
        read=rank_value(lambda run, slot: max(0.0, run.monotonic_seconds - slot.last_progress_seconds)),
        help="Time since the rank last updated its slot: a phase change, a vote, rewards or tokens.",
    ),
    Metric(
        name="grpo_rank_completions_ended_total", kind="counter", unit="count", labels=(RANK, END_REASON),
        read=completions_ended,
        help="Completions of the rank by why they ended, whether or not generation is limited.",
    ),
    *(rank_metric(row) for row in TABLE),
    *COLLECTIVE_METRICS,
    *MEMORY_METRICS,
    *HOST_MEMORY_METRICS,
    *(metric for module in modules("metrics") for metric in module.METRICS),
)  # fmt: skip
"""Metrics read from the run. None of them is exported while the run cannot be observed."""

EXPORTER_METRICS: tuple[Metric[Exporter], ...] = (
    Metric(
        name="grpo_observation_failed", kind="gauge", unit="boolean",
        read=exporter_value(lambda exporter: float(exporter.failed)),
        help="1 if the run could not be read for this scrape; all other metrics of the run are then absent.",
    ),
    Metric(
        name="grpo_observation_failures_total", kind="counter", unit="count",
        read=exporter_value(lambda exporter: float(exporter.failures)),
        help="Failed reads of the run since the exporter started.",
    ),
    Metric(
        name="grpo_observation_timestamp_seconds", kind="gauge", unit="seconds",
        read=exporter_value(lambda exporter: exporter.observed_at),
        help="Unix time of the last successful read of the run; absent before the first one.",
    ),
)  # fmt: skip
"""Metrics of the exporter itself; always exported."""

ALL_METRICS: tuple[Metric[Any], ...] = (*RUN_METRICS, *EXPORTER_METRICS)

LABELS: dict[str, frozenset[str]] = {
    metric.name: frozenset({*metric.label_names, RUN_ID}) for metric in ALL_METRICS
}
"""Names and labels of all metrics: what a query may use."""
