"""The panels of the dashboard "Learning and recovery": what the model learns, and what faults cost.

Called by `_grafana.py`. How a panel looks is in `_panels.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.provisioning._panels import BuiltPanel, lines, row


def learning() -> list[BuiltPanel]:
    """Return the panels, from top to bottom."""
    return [*_rewards(), *_optimization(), *_rollouts(), *_recovery()]


def _rewards() -> list[BuiltPanel]:
    return [
        row("Rewards"),
        lines(
            "Reward", "short",
            {"mean": "max(grpo_reward{RUN})", "standard deviation": "avg(grpo_rank_reward_std{RUN})"},
            "Mean and standard deviation of the reward last logged.", from_zero=False,
        ),
        lines(
            "Reward by function", "short",
            {
                "{{function}}": "max by (function) (grpo_reward_function_mean{RUN})",
                "{{function}}, standard deviation": "max by (function) (grpo_reward_function_std{RUN})",
            },
            "Mean and standard deviation of each reward function last logged.", from_zero=False,
        ),
        lines(
            "Reward latency", "s",
            {
                "{{function}}": "sum by (function) (rate(grpo_reward_seconds_total{RUN}[$__rate_interval]))"
                " / sum by (function) (rate(grpo_reward_calls_total{RUN}[$__rate_interval]))"
            },
            "Mean time of a call of each reward function.",
        ),
        lines(
            "Reward failures", "short",
            {
                "{{kind}}": "max by (kind) (increase(grpo_reward_failures_total{RUN}[$__rate_interval])) > 0",
                "workers replaced":
                    "max(increase(grpo_reward_workers_replaced_total{RUN}[$__rate_interval])) > 0",
            },
            "Calls of reward functions that failed in a worker, by kind; empty if there are none.",
        ),
        lines(
            "Masked samples", "short",
            {
                "{{reason}}":
                    "max by (reason) (increase(grpo_samples_masked_total{RUN}[$__rate_interval])) > 0",
                "NaN read as not applicable":
                    "max(increase(grpo_nan_read_as_none_total{RUN}[$__rate_interval])) > 0",
            },
            "Samples left out of baseline and loss, by reason; empty if there are none.",
        ),
        lines(
            "Steps without samples", "short",
            {
                "steps without samples": "max(grpo_steps_without_samples_total{RUN})",
                "groups without samples": "max(grpo_groups_masked_total{RUN})",
                "rewards computed again": "max(grpo_rewards_repeated_total{RUN})",
            },
            "Steps and groups of which no sample is left, and rollouts whose rewards were computed once"
            " more.",
            decimals=0,
        ),
    ]  # fmt: skip


def _optimization() -> list[BuiltPanel]:
    return [
        row("Optimization"),
        lines(
            "Loss and gradient norm", "short",
            {"loss": "avg(grpo_rank_loss{RUN})", "gradient norm": "avg(grpo_rank_grad_norm{RUN})"},
            "Mean over the ranks that report them; gradient norm on the right axis.",
            from_zero=False, right_axis={"gradient norm": "short"},
        ),
        lines(
            "KL divergence and entropy", "short",
            {
                "KL": "avg(grpo_rank_kl{RUN})", "entropy": "avg(grpo_rank_entropy{RUN})",
                "vLLM": "avg(grpo_rank_sampling_logp_difference{RUN})",
            },
            "Mean KL divergence from the reference model (absent while beta is 0), mean entropy of the policy"
            " (right axis), and mean difference of log-probabilities between vLLM and the trainer.",
            from_zero=False, right_axis={"entropy": "short"},
        ),
        lines(
            "Learning rate", "sci", {"learning rate": "avg(grpo_rank_learning_rate{RUN})"},
            "Learning rate last set by the scheduler.",
        ),
        lines(
            "Learning guards", "none",
            {
                "{{guard}}": "max by (guard) (grpo_guard_trips_total{RUN}) > 0",
                "non-finite steps refused": "max(grpo_nonfinite_total{RUN}) > 0",
            },
            "How often each guard has tripped, and steps refused because loss or gradient was not finite."
            " Empty if there were none.",
            decimals=0,
        ),
    ]  # fmt: skip


def _rollouts() -> list[BuiltPanel]:
    return [
        row("Rollouts"),
        lines(
            "Lengths", "short",
            {
                "completion, mean": "avg(grpo_rank_completion_length{RUN})",
                "completion, longest": "max(grpo_rank_completion_length_max{RUN})",
                "completion that ended itself, mean": "avg(grpo_rank_terminated_completion_length{RUN})",
                "prompt, mean": "avg(grpo_rank_prompt_length{RUN})",
            },
            "Tokens of completions and prompts, last logged.",
        ),
        lines(
            "Rollouts without effect", "percentunit",
            {
                "groups with equal rewards": "avg(grpo_rank_zero_variance_groups{RUN})",
                "completions at the maximum length": "avg(grpo_rank_truncated_completions{RUN})",
                "clipped tokens": "avg(grpo_rank_clip_ratio{RUN})",
            },
            "Shares last logged: groups in which all rewards are equal, completions that ended at the maximum"
            " length, and tokens whose probability ratio was clipped.",
            highest=1,
        ),
        lines(
            "Ends of completions", "percentunit",
            {
                "{{reason}}":
                    "sum by (reason) (rate(grpo_rank_completions_ended_total{RUN}[$__rate_interval]))"
                    " / scalar(sum(rate(grpo_rank_completions_ended_total{RUN}[$__rate_interval])))"
            },
            "Why completions ended: by themselves (eos), or at a limit.", highest=1, stacked=True,
        ),
        lines(
            "Completions per second", "short",
            {
                "generated": "sum(rate(grpo_rank_completions_total{RUN}[$__rate_interval]))",
                "scored": "sum(rate(grpo_rank_rewards_scored_total{RUN}[$__rate_interval]))",
            },
            "Completions generated and scored per second, over all ranks.",
        ),
    ]  # fmt: skip


def _recovery() -> list[BuiltPanel]:
    return [
        row("Faults and recovery"),
        lines(
            "Restarts by cause", "none",
            # Not increase(): Prometheus extrapolates it to fractions of a restart.
            {"{{cause}}, {{action}}": "max by (cause, action) (grpo_restarts_total{RUN}) > 0"},
            "Incidents followed by a new attempt since the start of the run. Empty if there were none.",
            decimals=0,
        ),
        lines(
            "Faults by outcome", "none",
            {"{{cause}}, {{outcome}}": "max by (cause, outcome) (grpo_faults_total{RUN}) > 0"},
            "Faults that were recovered, and faults at which the run was given up. Empty if there were none.",
            decimals=0,
        ),
        lines(
            "Detection and recovery time", "s",
            {
                "last detection": "max(grpo_last_detection_seconds{RUN})",
                "last recovery": "max(grpo_last_recovery_seconds{RUN})",
                "mean recovery": "max(grpo_recovery_duration_seconds_sum{RUN})"
                " / max(grpo_recovery_duration_seconds_count{RUN})",
                "mean detection": "max(grpo_detection_duration_seconds_sum{RUN})"
                " / max(grpo_detection_duration_seconds_count{RUN})",
            },
            "Time from a fault to its verdict, and to the first step committed after it.",
        ),
        lines(
            "Goodput", "percentunit", {"goodput": "max(grpo_goodput{RUN})"},
            "Fraction of wall time since the start of the run spent on steps that were kept.", highest=1,
        ),
        lines(
            "Steps done again", "none",
            {
                "repeated steps": "max(grpo_lost_steps_total{RUN})",
                "restarts that repeated or left out saved work": "max(grpo_resume_mismatches_total{RUN})",
            },
            "Committed steps that recoveries repeated.", decimals=0,
        ),
        lines(
            "Checkpoints", "none",
            {
                "{{result}}": "max by (result) (grpo_checkpoints_total{RUN})",
                "cannot be written": "max(grpo_checkpoint_trouble{RUN})",
                "last one verified": "max(grpo_checkpoint_verified{RUN})",
            },
            "Checkpoints by what became of them, and whether the last one matched its manifest.", decimals=0,
        ),
        lines(
            "Time and size of checkpoints", "s",
            {
                "mean time to disk": "max(grpo_checkpoint_duration_seconds_sum{RUN})"
                " / max(grpo_checkpoint_duration_seconds_count{RUN})",
                "size": "max(grpo_checkpoint_bytes{RUN})",
            },
            "Mean time to write a checkpoint to disk, and the size of the last one (right axis).",
            right_axis={"size": "bytes"},
        ),
        lines(
            "Warnings", "none",
            {
                "warnings": "max(grpo_warnings_total{RUN})",
                "journal writes lost": "max(grpo_journal_lost_total{RUN})",
                "failed reads of the run": "max(grpo_observation_failures_total{RUN})",
            },
            "Warnings in the journal, journal writes that the disk did not accept, and scrapes that could not"
            " read the run.",
            decimals=0,
        ),
    ]  # fmt: skip
