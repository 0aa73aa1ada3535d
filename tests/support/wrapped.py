"""Put one part's handlers around the methods of a trainer, as `rollouts_hooked` does with all parts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from grpo_run.runtime.rank.rollouts.generate_calls import in_sub_batches
from grpo_run.runtime.rank.rollouts.sample_masking import SampleMasking
from grpo_run.runtime.upstream.patches import wrapped_methods


def masked(trainer: Any, masking: SampleMasking) -> AbstractContextManager[None]:
    """Mask samples of the trainer's rollouts for the length of the block."""
    handlers = {
        "_generate_and_score_completions": [masking.mask_samples],
        "_calculate_rewards": [masking.choose_samples],
    }
    return wrapped_methods(trainer, handlers if masking.is_possible else {})


def divided(trainer: Any, count: int, **settings: Any) -> AbstractContextManager[None]:
    """Generate in parts for the length of the block."""
    return wrapped_methods(trainer, {"_generate_single_turn": [in_sub_batches(trainer, count, **settings)]})
