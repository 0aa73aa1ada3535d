"""Keys of the dictionary that GRPO's and RLOO's `_generate_and_score_completions` return, and of their
tables.

Used by `masking`. TRL has no documentation of them.
"""

from __future__ import annotations

from typing import Any

TRAINERS = frozenset(
    {("trl.trainer.grpo_trainer", "GRPOTrainer"), ("trl.trainer.rloo_trainer", "RLOOTrainer")}
)
"""Classes, by module and name, whose scoring leaves out rows of rewards that are NaN. Other trainers of TRL
have methods of the same names that do something else."""
COMPLETION_MASK = "completion_mask"
"""1 for each token of a completion, 0 for padding."""
TOOL_MASK = "tool_mask"
"""GRPO only, and only with tools: 0 for tokens that the policy has not written. The loss is multiplied by
it.
"""
ITEMS = "num_items_in_batch"
"""GRPO only: tokens in the loss, summed over the ranks."""
OLD_LOGPS = "old_logps"
"""RLOO only: log-probability of each completion under the policy that generated it."""
ADVANTAGES = "advantages"
COMPLETION_IDS = "completion_ids"
"""Keyword under which a reward function is given the tokens of the completions."""
PENDING_TABLES = ("_pending_extra_logs", "_pending_metrics")
"""Trainer attributes: what reward functions have logged for the rollout that is being scored."""
ZERO_STD = "frac_reward_zero_std"
"""Metric: share of groups whose samples all have the same reward."""


def leaves_out_nan(trainer: Any) -> bool:
    """Whether a trainer is GRPO's or RLOO's, or a subclass."""
    return any((base.__module__, base.__name__) in TRAINERS for base in type(trainer).__mro__)
