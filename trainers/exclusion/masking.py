"""Removes samples from the loss: masks the rows of excluded samples in what TRL computes after the rewards.

Called by `attach.py` on every rank when any rank has an excluded sample. GRPO multiplies its per-token loss by `tool_mask`,
which is not part of the attention mask, so log-probabilities stay as they are. RLOO has `completion_mask` only; the sum of
log-probabilities of a masked row is 0, and so must be the old one, or its ratio would be an exponential of hundreds. Whether a
masked row also leaves the divisor is TRL's: dapo, cispo, vespo and bnpo divide by tokens that count, the others by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from grpo_run.trainers.upstream.rollout_names import (
    ADVANTAGES,
    COMPLETION_MASK,
    ITEMS,
    OLD_LOGPS,
    TOOL_MASK,
)


def can_mask(rollout: Any) -> bool:
    """Whether a rollout is one of GRPO's or RLOO's."""
    return (
        isinstance(rollout, dict)
        and COMPLETION_MASK in rollout
        and (ITEMS in rollout or OLD_LOGPS in rollout)
    )


def mask(rollout: dict[str, Any], rows: Collection[int], gather: Callable[[Any], Any]) -> None:
    """Mask rows of a rollout of this rank. Collective for GRPO: every rank calls it, also without rows.

    Args:
        rollout: what TRL's method returned; changed in place.
        rows: the excluded rows of this rank.
        gather: the accelerator's, which concatenates over the ranks.
    """
    keep = rollout[COMPLETION_MASK].new_ones(len(rollout[COMPLETION_MASK]))
    keep[list(rows)] = 0
    dropped = keep == 0
    if ADVANTAGES in rollout:
        advantages = rollout[ADVANTAGES]
        rollout[ADVANTAGES] = advantages.masked_fill(_like(dropped, advantages), 0)
    if ITEMS in rollout:
        present = rollout.get(TOOL_MASK)
        tool_mask = (
            rollout[COMPLETION_MASK].new_ones(rollout[COMPLETION_MASK].shape) if present is None else present
        )
        rollout[TOOL_MASK] = tool_mask * _like(keep, tool_mask)
        counted = (rollout[COMPLETION_MASK] * rollout[TOOL_MASK]).sum()
        rollout[ITEMS] = gather(counted).sum()
    else:
        rollout[COMPLETION_MASK] = rollout[COMPLETION_MASK] * _like(keep, rollout[COMPLETION_MASK])
        rollout[OLD_LOGPS] = rollout[OLD_LOGPS].masked_fill(_like(dropped, rollout[OLD_LOGPS]), 0)


def _like(rows: Any, tensor: Any) -> Any:
    """Give one value for each row the shape that broadcasts over a tensor."""
    return rows.view(-1, *[1] * (tensor.dim() - 1))
