"""The panels of the dashboard "Overview": is the run well, how far is it, where does its time go.

Called by `_grafana.py`. How a panel looks is in `_panels.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.metrics.metric import RUN_STATES
from grpo_run.dashboards.provisioning._panels import (
    PHASE_COLORS,
    STATE_COLORS,
    WALL_COLORS,
    BuiltPanel,
    bands,
    gauge,
    lines,
    one_hot_number,
    row,
    stat,
    value_mapping,
)

STATE_QUERY = one_hot_number("grpo_run_state", "state", RUN_STATES, "run_id")
_HEADROOM = (("red", None), ("orange", 0.03), ("green", 0.1))


def overview() -> list[BuiltPanel]:
    """Return the panels, from top to bottom."""
    return [
        row("Is it well?"),
        stat(
            "State", {"state": STATE_QUERY},
            "Lifecycle state of the run. “no data”: no exporter reports this run.",
            mappings=value_mapping(STATE_COLORS, RUN_STATES), empty="no data",
        ),
        gauge(
            "Progress", {"done": "max(grpo_step{RUN}) / max(grpo_target_steps{RUN})"},
            "Committed steps as a fraction of the target of the current train() call.",
            steps=[("blue", None)],
        ),
        stat(
            "Time left", {"left": "max(grpo_eta_seconds{RUN})"},
            "Time until the current train() call ends at the present pace.", unit="s",
        ),
        gauge(
            "Goodput", {"goodput": "max(grpo_goodput{RUN})"},
            "Fraction of wall time spent on steps that were kept.",
            steps=[("red", None), ("orange", 0.5), ("green", 0.9)],
        ),
        stat(
            "Checkpoint age", {"age": "min(time() - grpo_checkpoint_timestamp_seconds{RUN})"},
            "Time since a checkpoint was published on disk. Snapshots in memory are newer.", unit="s",
        ),
        stat(
            "Exporter", {"failed": "max(grpo_observation_failed{RUN})"},
            "Whether the exporter could read the run at the last scrape.",
            mappings={0: ("ok", "green"), 1: ("failing", "red")}, empty="no data",
        ),
        stat(
            "Last incident: cause, culprit, action",
            {"{{cause}}, rank {{culprit}}: {{action}}": "topk(1, grpo_last_incident_info{RUN})"},
            "Verdict on the last incident, and the action taken.", width=8, show_name=True, empty="none",
        ),
        stat(
            "Attempts", {"attempts": "max(grpo_attempts_total{RUN})"},
            "Attempts started, including the first one.",
        ),
        stat(
            "Failures without progress", {"failures": "max(grpo_failures_without_progress{RUN})"},
            "Consecutive failures since a checkpoint last reached a new highest step.",
            steps=[("green", None), ("orange", 1), ("red", 2)],
        ),
        stat(
            "Free GPU memory, least",
            {"free": "1 - max(grpo_rank_gpu_memory_peak_bytes{RUN} / on (run_id, rank) group_left ()"
             " grpo_rank_gpu_memory_capacity_bytes{RUN})"},
            "Share of a GPU's memory that was still free at the highest peak of any rank.",
            unit="percentunit", decimals=0, steps=_HEADROOM,
        ),
        stat(
            "Free host memory",
            {
                "free": "1 - max(grpo_host_memory_working_set_bytes{RUN})"
                " / max(grpo_host_memory_limit_bytes{RUN})"
            },
            "Share of the limit that the working set leaves free.", unit="percentunit", decimals=0,
            steps=_HEADROOM,
        ),
        row("Progress"),
        lines(
            "Steps", "none",
            {
                "committed": "max(grpo_step{RUN})",
                "checkpoint": "max(grpo_checkpoint_step{RUN})",
                "snapshot": "max(grpo_snapshot_step{RUN})",
                "target": "max(grpo_target_steps{RUN})",
            },
            "Committed, checkpointed, snapshotted and target steps. A drop shows steps that a recovery"
            " repeats.",
            decimals=0,
        ),
        lines(
            "Reward and completion length", "short",
            {
                "reward": "max(grpo_reward{RUN})",
                "its standard deviation": "avg(grpo_rank_reward_std{RUN})",
                "completion length": "avg(grpo_rank_completion_length{RUN})",
            },
            "Mean and standard deviation of the reward last logged, and mean completion length in tokens"
            " (right axis).",
            from_zero=False, right_axis={"completion length": "suffix: tokens"},
        ),
        lines(
            "Step time", "s",
            {
                "median of the last steps": "max(grpo_step_seconds{RUN})",
                "95 % of steps are shorter": "histogram_quantile(0.95, sum by (le)"
                " (rate(grpo_step_duration_seconds_bucket{RUN}[$__rate_interval])))",
            },
            "Duration of an optimizer step. The upper line includes evaluations, checkpoints and waiting.",
        ),
        lines(
            "Tokens per second", "short",
            {
                "generated": "sum(rate(grpo_rank_tokens_generated_total{RUN}[$__rate_interval]))",
                "prompts": "sum(rate(grpo_rank_prompt_tokens_total{RUN}[$__rate_interval]))",
            },
            "Tokens of completions and of their prompts per second, over all ranks.",
        ),
        row("Where the time goes"),
        lines(
            "Wall time by state", "percentunit",
            {"{{state}}": "sum by (state) (rate(grpo_wall_seconds_total{RUN}[$__rate_interval]))"},
            "Share of wall time in steps that were kept, starts, checkpoints, detection of faults,"
            " recoveries, and steps done again.",
            highest=1, stacked=True, colors=WALL_COLORS,
        ),
        lines(
            "Time of the ranks by phase", "percentunit",
            {"{{phase}}": "sum by (phase) (rate(grpo_phase_duration_seconds_sum{RUN}[$__rate_interval]))"
             " / scalar(count(grpo_rank_observable{RUN}))"},
            "Share of the ranks' time in each phase, of phases that have ended. Nested phases count twice.",
            stacked=True, colors=PHASE_COLORS,
        ),
        bands(
            "Run state", {"run": STATE_QUERY}, "Lifecycle state of the run over time.",
            height=4, mappings=value_mapping(STATE_COLORS, RUN_STATES),
        ),
    ]  # fmt: skip
