"""Seeds by place: each sample of a rollout has its own, the same on any rank and in a repeated step.

For code of a script that draws random numbers and takes a seed. Nothing of it depends on the attempt or on
the run's name, so a run that was interrupted draws what an undisturbed one draws. Called by features.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.memory.script_settings import record_of
from grpo_run.runtime.upstream import trainer_names


def seed_of(trainer: Any, sample: int) -> int:
    """Return the seed of a sample of the rollout that is generated: by the script's seed, and by rollout,
    prompt and generation; less than 2^32.

    Args:
        sample: its number in the rollout of all ranks.
    """
    rollout = getattr(trainer, trainer_names.MICRO_STEP) // record_of(trainer.args).divided_by
    prompt, generation = divmod(sample, trainer.num_generations)
    return zlib.crc32(f"{trainer.args.seed} {rollout} {prompt} {generation}".encode())


def takes_seed(function: Callable[..., Any]) -> bool:
    """Whether a function has an argument `seed`, and chooses none itself: the default is None."""
    try:
        seed = inspect.signature(function).parameters.get("seed")
    except (TypeError, ValueError):  # it shows none
        return False
    return seed is not None and seed.default is None
