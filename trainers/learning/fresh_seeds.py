"""Give the random generators of a rank new seeds at a step, so that another rollout is sampled from then on.

The supervisor orders it when an exact repetition has ended in the same alarm (`FreshSeeds`). The order of the data does
not change. Called by `guards.py`.
"""

from __future__ import annotations

import random
import sys
import zlib

from grpo_run.runtime.continuity.fresh_seeds import FreshSeeds

_SEEDS = 2**32


def seed_of(run_id: str, order: FreshSeeds, group: int) -> int:
    """Return the seed of a group of ranks: reproducible, and different for each run, order and group.

    Args:
        group: the rank, or what ranks have in common that must sample alike.
    """
    return zlib.crc32(f"{run_id} {order.number} {group}".encode()) % _SEEDS


def reseed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed)
    if torch is not None:
        torch.manual_seed(seed)
