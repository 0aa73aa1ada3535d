"""What the user could change so that a healthy run takes less time: an under-used GPU, and ranks that wait
for one that generates longer.

Called by the supervisor after each committed step. Each advice is given once in a launch, as a warning on the
terminal and in the journal. It is no fault and changes nothing. Pure: it is given what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.text import size_text

STEADY_COMMITS = 50
"""Committed steps before anything is said: completions get longer and peaks higher in the first ones."""
UNDER_USED = 0.4
"""Share of a GPU's memory below which more rows are proposed."""
FULL = 0.8
"""Share of a GPU's memory that a proposal may need, if all of the peak grew with the rows, which it does not.
"""
UNEVEN = 0.25
"""Share of the time of generation that ranks wait on average, from which it is told."""


def larger_batch(facts: MemoryFacts, peak_bytes: int, capacity_bytes: int) -> str | None:
    """Return the larger micro-batch that computes the same update, as a sentence; None if there is none.

    Args:
        facts: of the `train()` call.
        peak_bytes: highest that the allocator has reserved on any rank.
        capacity_bytes: of the smallest GPU.
    """
    if capacity_bytes <= 0 or not 0 < peak_bytes < UNDER_USED * capacity_bytes:
        return None
    accumulation, factor = facts.gradient_accumulation_steps, 1
    while accumulation % (2 * factor) == 0 and 2 * factor * peak_bytes <= FULL * capacity_bytes:
        factor *= 2
    rows = facts.per_device_train_batch_size
    used = f"at most {size_text(peak_bytes)} of {size_text(capacity_bytes)} of a GPU were used"
    if factor == 1:
        return None
    steps = f"gradient_accumulation_steps={accumulation // factor}"
    if facts.steps_per_generation:
        steps += f" and steps_per_generation={max(1, facts.steps_per_generation // factor)}"
    return (
        f"{used}: per_device_train_batch_size={rows * factor} with {steps} computes the same update in fewer"
        f" passes, and needs at most about {size_text(factor * peak_bytes)}"
    )


class GenerationBalance:
    """How long the ranks of one attempt wait for the one that generates longest, in forward passes."""

    def __init__(self) -> None:
        self._passes: dict[int, int] = {}
        self._longest = self._all = 0
        self._slowest: dict[int, int] = {}
        self._rollouts = 0

    def committed(self, slots: Mapping[int, Slot | None]) -> None:
        """A step has been committed."""
        passes = {rank: slot.generation_passes for rank, slot in slots.items() if slot is not None}
        new = {rank: count - self._passes[rank] for rank, count in passes.items() if rank in self._passes}
        self._passes = passes
        if len(new) < 2 or min(new.values()) < 0 or not any(new.values()):
            return
        self._rollouts += 1
        self._longest += len(new) * max(new.values())
        self._all += sum(new.values())
        slowest = max(new, key=lambda rank: new[rank])
        self._slowest[slowest] = self._slowest.get(slowest, 0) + 1

    @property
    def advice(self) -> str | None:
        """What is told if ranks wait for long; None if they do not."""
        waited = 1 - self._all / self._longest if self._longest else 0.0
        if self._rollouts < STEADY_COMMITS // 2 or waited < UNEVEN:
            return None
        rank, count = max(self._slowest.items(), key=lambda item: item[1])
        who = (
            f"rank {rank} is the longest in {count} of {self._rollouts} rollouts"
            if count > 0.8 * self._rollouts
            else "now one and now another is the longest"
        )
        remedy = (
            "a fixed part of each batch goes to it: shuffle the data set"
            if count > 0.8 * self._rollouts
            else "end the longest completions earlier (max_completion_length, or `--generation` repetition)"
        )
        return (
            f"ranks wait for one another in generation for {waited:.0%} of its time; {who}. To change that,"
            f" {remedy}, or generate with vLLM"
        )


class Advice:
    """What was observed in one launch, and what was said.

    Args:
        facts: returns the facts of the `train()` call; None if there are none.
        say: shows a sentence and appends it to the journal.
    """

    def __init__(self, facts: Callable[[], MemoryFacts | None], say: Callable[[str], None]) -> None:
        self._facts = facts
        self._say = say
        self._said: set[str] = set()
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Ranks count from zero again."""
        self._commits = 0
        self._balance = GenerationBalance()

    def committed(
        self, slots: Mapping[int, Slot | None], read_memory: Callable[[], Mapping[int, RankMemory]]
    ) -> None:
        """A step has been committed.

        Args:
            slots: of all local ranks.
            read_memory: returns the memory of the ranks now; called once in an attempt.
        """
        self._commits += 1
        self._balance.committed(slots)
        if self._commits % STEADY_COMMITS == 0:
            self._say_once("balance", self._balance.advice)
        if self._commits == STEADY_COMMITS:
            memory = [one for one in read_memory().values() if one.has_device and one.capacity_bytes]
            facts = self._facts() if memory else None
            if facts is not None:
                peak = max(one.peak_reserved_bytes for one in memory)
                capacity = min(one.capacity_bytes for one in memory)
                self._say_once("memory", larger_batch(facts, peak, capacity))

    def _say_once(self, subject: str, sentence: str | None) -> None:
        if sentence is not None and subject not in self._said:
            self._said.add(subject)
            self._say(sentence)
