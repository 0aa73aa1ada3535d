"""Ranks that continue only because torch's allocator releases all of its caches in every step.

An allocation that fails is retried after all cached memory has been returned to the device. A few retries are
harmless; a rank that retries in every step is about to run out of memory. Filled by the supervisor at each
committed step from what ranks measure; reported, and never a fault. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.memory.phase_memory import RankMemory

STREAK_COMMITS = 10
"""Committed steps in a row, each with retries, after which they are reported. Composer takes two for
exhausted memory; with vLLM in the rank, single ones are usual whenever it wakes up.
"""


class RetryWatch:
    """The retries of all local ranks of one attempt."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._streaks: dict[int, list[int]] = {}
        self._memory: Mapping[int, RankMemory] = {}

    def committed(self, memory: Mapping[int, RankMemory]) -> None:
        """A step has been committed.

        Args:
            memory: of the local ranks.
        """
        for rank, one in memory.items():
            new = one.retries - self._known.get(rank, one.retries) if one.has_device else 0
            self._streaks[rank] = [*self._streaks.get(rank, []), new][-STREAK_COMMITS:] if new > 0 else []
        self._known = {rank: one.retries for rank, one in memory.items()}
        self._memory = memory

    @property
    def warning(self) -> tuple[int, str] | None:
        """A rank that has retried in each of the last steps, and what the user is told; None while there is
        none.
        """
        rank = next((rank for rank, counts in self._streaks.items() if len(counts) == STREAK_COMMITS), None)
        if rank is None:
            return None
        phases = self._memory[rank].phases
        phase = max(phases, key=lambda one: phases[one].retries, default=None)
        place = f" (phase {phase.name})" if phase is not None else ""
        return (
            rank,
            (
                f"GPU memory of rank {rank} is nearly exhausted{place}: in each of the last {STREAK_COMMITS}"
                " steps, allocations succeeded only after all caches were returned"
                f" ({sum(self._streaks[rank])} retries)"
            ),
        )
