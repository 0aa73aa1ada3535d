"""The rows of the Grafana dashboard: which panels each has, what they query.

Called by `_grafana.py`, which places the panels and checks every query against the metric catalogue. How a
panel looks is in `_panels.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.metrics.metric import PHASES, RUN_STATES
from grpo_run.dashboards.provisioning._memory_rows import host_memory_panels, memory_rows
from grpo_run.dashboards.provisioning._panels import (
    BuiltPanel,
    row,
    stat,
    stat_gauge,
    state_timeline,
    time_series,
)

RUN = 'run_id="$run_id"'
UNOBSERVABLE = -1
NO_OPEN_PHASE = 0

STATE_COLORS = {
    "starting": "light-blue",
    "running": "green",
    "suspect": "yellow",
    "collecting": "orange",
    "recovering": "dark-orange",
    "stopping": "light-purple",
    "finished": "dark-green",
    "stopped": "purple",
    "failed": "red",
    "unknown": "dark-red",
}
PHASE_COLORS = {
    "startup": "super-light-blue",
    "data": "light-yellow",
    "generate": "green",
    "reward": "purple",
    "score": "light-purple",
    "forward_backward": "blue",
    "optimizer": "dark-blue",
    "vote": "orange",
    "checkpoint": "dark-yellow",
    "eval": "light-green",
    "cleanup": "light-orange",
    "idle": "text",
    "callback": "dark-purple",
}


def one_hot_number(metric: str, label: str, values: tuple[str, ...], by: str) -> str:
    """Return a query that gives the position of the current value of a one-hot metric.

    Positions count from 1; 0 means that no value is 1. The result has one series per value of the label `by`.
    """
    terms = [f'{place} * {metric}{{{RUN},{label}="{value}"}}' for place, value in enumerate(values, start=1)]
    return f"max by ({by}) ({' or '.join(terms)})"


def all_rows() -> list[BuiltPanel]:
    """Return the panels of all rows, from top to bottom."""
    return [
        *_overview(), *_progress(), *_ranks(), *_faults(), *memory_rows(RUN), *host_memory_panels(RUN),
        *_overhead(), *_training(),
    ]  # fmt: skip


def _state_query() -> str:
    return one_hot_number("grpo_run_state", "state", RUN_STATES, "run_id")


def _value_mapping(colors: dict[str, str], names: tuple[str, ...]) -> dict[int, tuple[str, str]]:
    return {place: (name, colors[name]) for place, name in enumerate(names, start=1)}


def _overview() -> list[BuiltPanel]:
    return [
        row("Overview"),
        stat(
            "State", width=4, height=5, queries={"state": _state_query()},
            mappings=_value_mapping(STATE_COLORS, RUN_STATES), empty="no data",
            description="Lifecycle state of the run. “no data”: no exporter reports this run.",
        ),
        stat(
            "Last incident: cause, culprit, action", width=6, height=5, show_name=True, empty="none",
            queries={
                "{{cause}}, rank {{culprit}}: {{action}}": f"topk(1, grpo_last_incident_info{{{RUN}}})",
            },
            description="Verdict on the last incident, and the action taken.",
        ),
        stat_gauge(
            "Progress", width=4, height=5, unit="percentunit", steps=[("blue", None)],
            queries={"done": f"max(grpo_step{{{RUN}}}) / max(grpo_target_steps{{{RUN}}})"},
            description="Committed steps as a fraction of the target of the current train() call.",
        ),
        stat_gauge(
            "Goodput", width=4, height=5, unit="percentunit",
            steps=[("red", None), ("orange", 0.5), ("green", 0.9)],
            queries={"goodput": f"max(grpo_goodput{{{RUN}}})"},
            description="Fraction of wall time spent on steps that were kept.",
        ),
        stat(
            "Attempts", width=3, height=5, queries={"attempts": f"max(grpo_attempts_total{{{RUN}}})"},
            description="Attempts started, including the first one.",
        ),
        stat(
            "Exporter", width=3, height=5, empty="no data",
            queries={"failed": f"max(grpo_observation_failed{{{RUN}}})"},
            mappings={0: ("ok", "green"), 1: ("failing", "red")},
            description="Whether the exporter could read the run at the last scrape.",
        ),
    ]  # fmt: skip


def _progress() -> list[BuiltPanel]:
    return [
        row("Training progress"),
        time_series(
            "Steps", width=12, height=8, unit="none", decimals=0,
            queries={
                "committed": f"max(grpo_step{{{RUN}}})",
                "checkpoint": f"max(grpo_checkpoint_step{{{RUN}}})",
                "snapshot": f"max(grpo_snapshot_step{{{RUN}}})",
                "target": f"max(grpo_target_steps{{{RUN}}})",
            },
            description="Committed, checkpointed, snapshotted and target steps. A drop shows steps that a"
            " recovery repeats.",
        ),
        time_series(
            "Reward and completion length", width=12, height=8, unit="short", from_zero=False,
            queries={
                "reward": f"max(grpo_reward{{{RUN}}})",
                "its standard deviation": f"avg(grpo_rank_reward_std{{{RUN}}})",
                "completion length": f"avg(grpo_rank_completion_length{{{RUN}}})",
            },
            right_axis={"completion length": "tokens"},
            description="Mean and standard deviation of the reward last logged, and mean completion length"
            " in tokens (right axis).",
        ),
        time_series(
            "Step time and time left", width=12, height=8, unit="s",
            queries={
                "step": f"max(grpo_step_seconds{{{RUN}}})",
                "time left": f"max(grpo_eta_seconds{{{RUN}}})",
            },
            right_axis={"time left": "s"},
            description="Median duration of the last steps, and time until the train() call ends at this"
            " pace (right axis).",
        ),
        time_series(
            "Waiting for a rank", width=12, height=8, unit="s",
            queries={
                "rank {{rank}}, {{phase}}": f"max by (rank, phase) (grpo_run_awaited_rank_seconds{{{RUN}}})",
                "deadline of rank {{rank}}, {{phase}}":
                    f"max by (rank, phase) (grpo_run_awaited_rank_deadline_seconds{{{RUN}}})",
            },
            description="How long the run has waited for a rank, and until when it may. Gaps: no rank"
            " was waited for.",
        ),
    ]  # fmt: skip


def _ranks() -> list[BuiltPanel]:
    phase = one_hot_number("grpo_rank_phase", "phase", PHASES, "rank")
    blind = f"max by (rank) (grpo_rank_observable{{{RUN}}} == 0) - 1"
    phases = _value_mapping(PHASE_COLORS, PHASES) | {
        UNOBSERVABLE: ("unobservable", "red"),
        NO_OPEN_PHASE: ("no phase", "text"),
    }
    return [
        row("Ranks"),
        state_timeline(
            "Run state", width=24, height=4, queries={"run": _state_query()},
            mappings=_value_mapping(STATE_COLORS, RUN_STATES),
            description="Lifecycle state of the run over time.",
        ),
        state_timeline(
            "Phase by rank", width=24, height=8, queries={"rank {{rank}}": f"{phase} or {blind}"},
            mappings=phases,
            description="Innermost open phase of each rank. Check a rank first if its phase differs from"
            " that of the other ranks.",
        ),
        time_series(
            "Time since last progress, by rank", width=12, height=8, unit="s",
            queries={
                "rank {{rank}}": f"max by (rank) (grpo_rank_last_progress_age_seconds{{{RUN}}})",
            },
            description="A rising line is a rank without progress; a line that ends is a rank that cannot"
            " be observed.",
        ),
        time_series(
            "Voted step by rank", width=12, height=8, unit="none", decimals=0, from_zero=False,
            queries={"rank {{rank}}": f"max by (rank) (grpo_rank_voted_step{{{RUN}}})"},
            description="The other ranks wait for the rank with the lowest line.",
        ),
    ]  # fmt: skip


def _faults() -> list[BuiltPanel]:
    return [
        row("Incidents and recoveries"),
        time_series(
            "Restarts by cause", width=8, height=8, unit="none", decimals=0,
            # Not increase(): Prometheus extrapolates it to fractions of a restart.
            queries={"{{cause}}, {{action}}": f"max by (cause, action) (grpo_restarts_total{{{RUN}}}) > 0"},
            description="Incidents followed by a new attempt since the start of the run. Empty if"
            " there were none.",
        ),
        time_series(
            "Goodput", width=8, height=8, unit="percentunit", highest=1,
            queries={"goodput": f"max(grpo_goodput{{{RUN}}})"},
            description="Fraction of wall time since the start of the run spent on steps that were kept.",
        ),
        time_series(
            "Detection and recovery time", width=8, height=8, unit="s",
            queries={
                "last detection": f"max(grpo_last_detection_seconds{{{RUN}}})",
                "last recovery": f"max(grpo_last_recovery_seconds{{{RUN}}})",
            },
            description="Time from the last fault to its verdict, and to the first step committed after it.",
        ),
    ]  # fmt: skip


def _overhead() -> list[BuiltPanel]:
    return [
        row("Overhead"),
        time_series(
            "Time waiting in votes", width=12, height=8, unit="percentunit",
            queries={
                "rank {{rank}}": "max by (rank)"
                f" (rate(grpo_rank_vote_wait_seconds_total{{{RUN}}}[$__rate_interval]))",
            },
            description="Fraction of time each rank waits for the others. The slowest rank waits least.",
        ),
        time_series(
            "Time in memory cleanup", width=12, height=8, unit="percentunit",
            queries={
                "rank {{rank}}": "max by (rank)"
                f" (rate(grpo_rank_cleanup_seconds_total{{{RUN}}}[$__rate_interval]))",
            },
            description="Fraction of time spent on garbage collection and on returning memory to the system.",
        ),
    ]  # fmt: skip


def _training() -> list[BuiltPanel]:
    return [
        row("Training"),
        time_series(
            "Loss and gradient norm",
            width=12,
            height=8,
            unit="short",
            from_zero=False,
            queries={
                "loss": f"avg(grpo_rank_loss{{{RUN}}})",
                "gradient norm": f"avg(grpo_rank_grad_norm{{{RUN}}})",
            },
            right_axis={"gradient norm": "short"},
            description="Mean over the ranks that report them; gradient norm on the right axis.",
        ),
        time_series(
            "Learning rate",
            width=6,
            height=8,
            unit="sci",
            queries={"learning rate": f"avg(grpo_rank_learning_rate{{{RUN}}})"},
            description="Learning rate last set by the scheduler.",
        ),
        time_series(
            "Generation",
            width=6,
            height=8,
            unit="short",
            queries={
                "tokens/s": f"sum(rate(grpo_rank_tokens_generated_total{{{RUN}}}[$__rate_interval]))",
                "rewards/s": f"sum(rate(grpo_rank_rewards_scored_total{{{RUN}}}[$__rate_interval]))",
            },
            right_axis={"rewards/s": "short"},
            description=(
                "Completion tokens and scored completions per second over all ranks; rewards on the right"
                " axis."
            ),
        ),
        time_series(
            "KL divergence and entropy",
            width=12,
            height=8,
            unit="short",
            from_zero=False,
            queries={"KL": f"avg(grpo_rank_kl{{{RUN}}})", "entropy": f"avg(grpo_rank_entropy{{{RUN}}})"},
            right_axis={"entropy": "short"},
            description=(
                "Mean KL divergence from the reference model (absent while beta is 0), and mean entropy of"
                " the policy (right axis)."
            ),
        ),
        time_series(
            "Rollouts without effect",
            width=12,
            height=8,
            unit="percentunit",
            highest=1,
            queries={
                "groups with equal rewards": f"avg(grpo_rank_zero_variance_groups{{{RUN}}})",
                "completions at the maximum length": f"avg(grpo_rank_truncated_completions{{{RUN}}})",
                "clipped tokens": f"avg(grpo_rank_clip_ratio{{{RUN}}})",
            },
            description=(
                "Shares last logged: groups in which all rewards are equal, completions that ended at the"
                " maximum length, and tokens whose probability ratio was clipped."
            ),
        ),
        time_series(
            "Masked samples",
            width=12,
            height=8,
            unit="short",
            queries={
                "{{reason}}": (
                    f"max by (reason) (increase(grpo_samples_masked_total{{{RUN}}}[$__rate_interval])) > 0"
                )
            },
            description="Samples left out of baseline and loss, by reason; empty if there are none.",
        ),
        time_series(
            "Reward latency",
            width=12,
            height=8,
            unit="s",
            queries={
                "{{function}}": (
                    f"sum by (function) (rate(grpo_reward_seconds_total{{{RUN}}}[$__rate_interval]))"
                    f" / sum by (function) (rate(grpo_reward_calls_total{{{RUN}}}[$__rate_interval]))"
                )
            },
            description="Mean time of a call of each reward function.",
        ),
        time_series(
            "Reward failures",
            width=8,
            height=8,
            unit="short",
            queries={
                "{{kind}}": (
                    f"max by (kind) (increase(grpo_reward_failures_total{{{RUN}}}[$__rate_interval])) > 0"
                ),
                "workers replaced": (
                    f"max(increase(grpo_reward_workers_replaced_total{{{RUN}}}[$__rate_interval])) > 0"
                ),
            },
            description=(
                "Calls of reward functions that failed in a worker, by kind; empty if there are none."
            ),
        ),
        time_series(
            "Steps without samples",
            width=8,
            height=8,
            unit="short",
            queries={
                "steps without samples": f"max(grpo_steps_without_samples_total{{{RUN}}})",
                "groups without samples": f"max(grpo_groups_masked_total{{{RUN}}})",
                "rewards computed again": f"max(grpo_rewards_repeated_total{{{RUN}}})",
            },
            description=(
                "Steps and groups of which no sample is left, and rollouts whose rewards were computed once"
                " more."
            ),
        ),
        time_series(
            "Ends of completions",
            width=8,
            height=8,
            unit="short",
            queries={
                "{{reason}}": (
                    "sum by (reason)"
                    f" (increase(grpo_rank_completions_ended_total{{{RUN}}}[$__rate_interval])) > 0"
                )
            },
            description=(
                "Completions by why they ended: by themselves (eos), or at a limit; empty while no cap on"
                " generation is set."
            ),
        ),
    ]
