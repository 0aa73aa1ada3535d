"""The full head: log-probabilities from whole logits, as TRL computed them before its fused head.

Used by the script of the experiment. Replaces the forward pass of the model, not a method of the trainer, so
TRL's loss stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

from trl.trainer.utils import FusedCausalLMOutput, entropy_from_logits, selective_log_softmax


def use_full_head(model: Any, temperature: float) -> None:
    """Answer the forward passes that ask for the fused head by whole logits.

    Args:
        model: one that a trainer of TRL has given the fused head.
        temperature: that logits are divided by.
    """
    fused = model.forward

    @functools.wraps(fused)  # `generate` looks at the signature
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(*args, labels=labels, **kwargs)
        logits = fused(*args, use_cache=False, **kwargs).logits[:, :-1] / temperature
        targets = labels[:, 1:]
        mask = targets != -100
        log_probs = selective_log_softmax(logits, targets.clamp(min=0)).masked_fill(~mask, 0)
        entropy = entropy_from_logits(logits.detach()).masked_fill(~mask, 0)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, label_mask=mask)

    model.forward = forward
