"""How much a rank's allocated memory has grown in its attempt: what a restart without a change would free.

Filled by the supervisor from the board, where the ranks publish their memory by phase; read after an out-of-memory error.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_run.watchdog.accounting.phase_memory import RankMemory
from grpo_run.watchdog.observation import Phase

EARLY_COMMITS = 3
"""Commits of an attempt after which every step has allocated what it keeps: Adam's state exists from the first step on."""


class MemoryGrowth:
    """Growth of the ranks of one attempt."""

    def __init__(self) -> None:
        self._commits = 0
        self._early: dict[int, int] = {}

    def committed(self, read: Callable[[], Mapping[int, RankMemory]]) -> None:
        """A step has been committed.

        Args:
            read: returns the memory of the ranks now; called once in an attempt.
        """
        self._commits += 1
        if self._commits == EARLY_COMMITS:
            self._early = {rank: _kept_bytes(memory) for rank, memory in read().items()}

    def grown_bytes(self, rank: int, memory: RankMemory | None) -> int:
        """Return how much more a rank keeps between its steps than early in the attempt; 0 if it is not known."""
        if memory is None or not self._early.get(rank):
            return 0
        return max(0, _kept_bytes(memory) - self._early[rank])


def _kept_bytes(memory: RankMemory) -> int:
    """What tensors on the device use after an optimizer step."""
    optimizer = memory.phases.get(Phase.optimizer)
    return optimizer.allocated_bytes if optimizer is not None else 0
