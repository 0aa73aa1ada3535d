"""Sizes of MemGen's memory: what `trainers/memgen/` builds, and what a recipe may set.

Beside that folder, because a recipe is checked before torch is imported. Checks nothing itself: the section
of a recipe does (`trainers/recipes/recipe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Sizes of the memory.

    Attributes:
        prompt_latents: latent vectors at the end of the prompt.
        latents: latent vectors at each later augmentation.
        augmentations: the most augmentations of a completion, beyond the one of the prompt.
        lora_rank, lora_alpha, lora_dropout, lora_targets: of the adapters of weaver and trigger, as in peft's
            `LoraConfig`.
    """

    prompt_latents: PositiveInt = 16
    latents: PositiveInt = 8
    augmentations: PositiveInt = 5
    lora_rank: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    lora_targets: Sequence[str] = ("q_proj", "v_proj")
