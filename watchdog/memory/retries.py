"""A rank that continues only because torch's allocator releases all of its caches in every step, and the cost.

An allocation that fails is retried after all cached memory has been returned to the device, which waits for the device and makes
the next allocations slow. A few retries are harmless. A rank that retries in every step is about to run out of memory, and may
spend most of its time so. Filled by the supervisor at each committed step from what ranks measure; read there. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase

STREAK_COMMITS = 10
"""Committed steps in a row, each with retries, after which they are reported. Composer takes two for exhausted memory; with vLLM
in the rank, single ones are usual whenever it wakes up."""
USUAL_COMMITS = 10
"""Committed steps without a retry that show what a step costs."""
WARM_UP_COMMITS = 3
"""The first steps of an attempt compile and connect."""
THRASHING_SLOWDOWN = 3.0
"""From here on a restart with another memory plan pays within some minutes. A smaller micro-batch costs much less."""
_PARTS = {
    Phase.generate: MemoryPhase.generate,
    Phase.score: MemoryPhase.score,
    Phase.forward_backward: MemoryPhase.backward,
    Phase.optimizer: MemoryPhase.optimizer,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """Retries of one rank in each of the last steps.

    Args:
        phase: with the most of them.
        step: the last one.
        commits: how many committed steps in a row.
        count: of the retries in them.
        slowdown: how many times as long a step takes as without retries, also for each token generated; None if that is not
            known, as for a rank that has retried from its first steps on.
    """

    rank: int
    phase: MemoryPhase
    step: int
    commits: int
    count: int
    slowdown: float | None = None

    @property
    def is_thrashing(self) -> bool:
        """Whether the run would be much faster with a memory plan that needs less in this phase."""
        slow = self.slowdown is not None and self.slowdown >= THRASHING_SLOWDOWN
        return slow and self.phase is not MemoryPhase.unknown

    @property
    def text(self) -> str:
        """What was observed, as a clause."""
        slow = f", and steps take {self.slowdown:.1f} times as long" if self.is_thrashing else ""
        return (
            f"in each of the last {self.commits} steps, allocations succeeded only after all caches were returned"
            f" ({self.count} retries){slow}"
        )

    @property
    def warning(self) -> str:
        """What a user is told."""
        return f"GPU memory of rank {self.rank} is nearly exhausted (phase {self.phase}): {self.text}"


@dataclass(frozen=True, slots=True)
class _Commit:
    seconds: float
    seconds_per_token: float | None
    retried: frozenset[int]


class RetryWatch:
    """The retries of all local ranks of one attempt."""

    def __init__(self) -> None:
        self._commits: list[_Commit] = []
        self._usual: list[_Commit] = []
        self._streaks: dict[int, int] = {}
        self._counts: dict[int, list[int]] = {}
        self._known: dict[int, int] = {}
        self._memory: Mapping[int, RankMemory] = {}
        self._last: tuple[int, float, int] | None = None
        self._seen = 0
        self._step = 0

    def committed(self, step: int, now: float, tokens: int, memory: Mapping[int, RankMemory]) -> None:
        """A step has been committed.

        Args:
            step: its number.
            now: monotonic seconds.
            tokens: that all local ranks have generated in this attempt.
            memory: of the local ranks.
        """
        before = {rank: self._known.get(rank, 0) for rank in memory}
        self._known = {rank: one.retries for rank, one in memory.items()}
        self._memory, self._step = memory, step
        last, self._last = self._last, (step, now, tokens)
        if last is not None and step <= last[0]:  # another call: its steps are not comparable
            self._seen = 0
            self._usual.clear()
        self._seen += 1
        new = {rank: one.retries - before[rank] for rank, one in memory.items() if one.has_device}
        if last is None or self._seen <= WARM_UP_COMMITS:
            self._streaks.clear()
            self._counts.clear()
            return
        steps, seconds, made = step - last[0], now - last[1], tokens - last[2]
        for rank, count in new.items():
            self._streaks[rank] = self._streaks.get(rank, 0) + 1 if count > 0 else 0
            self._counts[rank] = [*self._counts.get(rank, []), count][-STREAK_COMMITS:]
        commit = _Commit(
            seconds / steps,
            seconds / made if made > 0 else None,
            frozenset(rank for rank in new if new[rank] > 0),
        )
        self._commits = [*self._commits, commit][-STREAK_COMMITS:]
        if not commit.retried:
            self._usual = [*self._usual, commit][-USUAL_COMMITS:]

    @property
    def found(self) -> Retries | None:
        """The rank that has retried in every step for longest; None while there is none."""
        rank = max(self._streaks, key=lambda one: self._streaks[one], default=None)
        if rank is None or self._streaks[rank] < STREAK_COMMITS:
            return None
        phases = self._memory[rank].phases if rank in self._memory else {}
        phase = max(phases, key=lambda one: phases[one].retries, default=None)
        return Retries(
            rank=rank,
            phase=_PARTS.get(phase, MemoryPhase.unknown) if phase is not None else MemoryPhase.unknown,
            step=self._step,
            commits=STREAK_COMMITS,
            count=sum(self._counts[rank]),
            slowdown=self._slowdown(),
        )

    def _slowdown(self) -> float | None:
        """How many times as long steps take, whichever is less: each step, or each of its tokens.

        Longer completions need more memory and more time; that is no thrashing.
        """
        if len(self._usual) < USUAL_COMMITS:
            return None
        usual = median(one.seconds for one in self._usual)
        ratios = [median(one.seconds for one in self._commits) / usual] if usual > 0 else []
        per_token = [
            [one.seconds_per_token for one in commits if one.seconds_per_token is not None]
            for commits in (self._commits, self._usual)
        ]
        now, then = per_token
        if now and then:
            ratios.append(median(now) / median(then))
        return min(ratios, default=None)
