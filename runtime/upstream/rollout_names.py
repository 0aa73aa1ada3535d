"""Names of GRPO's and RLOO's trainers that rollouts need: keys of what scoring returns, and methods and
attributes.

Used by `runtime/rank/rollouts/`, and by `runtime/planning/` for a traced trainer. TRL has no documentation of
them.
"""

from __future__ import annotations

from typing import Any

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
ZERO_STD = "frac_reward_zero_std"
"""Metric: share of groups whose samples all have the same reward."""
PROMPTS, COMPLETIONS = 0, 1
"""Places of the tokens of prompts and completions, a list for each row, in what `_generate` returns."""
SCORE = "_get_per_token_logps_and_entropies"
"""Method (model, input_ids, attention_mask, logits_to_keep, batch_size, ...): log-probabilities, `batch_size`
rows at once.
"""
ACCUMULATION = "current_gradient_accumulation_steps"
"""Attribute: micro-batches of the step in progress."""
EOS_TOKENS = "eos_token_ids"
"""Attribute: the tokens that end a completion. Since TRL 1.14; before, `EOS_TOKEN` of the trainer or of its
`TOKENIZER`."""
EOS_TOKEN = "eos_token_id"
TOKENIZER = "_tokenizer"


def end_tokens(trainer: Any) -> frozenset[int]:
    """Return the tokens that end a completion; empty if the trainer does not say."""
    if (several := getattr(trainer, EOS_TOKENS, None)) is not None:
        return frozenset(several)
    tokenizer = getattr(trainer, TOKENIZER, None)
    one = getattr(trainer, EOS_TOKEN, getattr(tokenizer, EOS_TOKEN, None))
    return frozenset() if one is None else frozenset((one,))


def tokens_of(generated: Any) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return the tokens of the prompts and completions of a rollout; None if a subclass returns something
    else.

    Args:
        generated: what `_generate` has returned.
    """
    try:
        prompts, completions = generated[PROMPTS], generated[COMPLETIONS]
    except (TypeError, LookupError):
        return None
    if not (isinstance(prompts, list) and isinstance(completions, list)):
        return None
    return (prompts, completions) if all(isinstance(row, list) for row in prompts + completions) else None
