"""The clock of the current step: where its time goes, and whether it makes progress.

The deadlines of phases (`watchdog.stalls`) end a phase that makes no progress. They do not see a step whose
ranks are busy without an end: phases that begin and end for ever, or collectives that count as progress. Such
a step is ended if for the deadline no rank has generated a token, scored a reward or run the model. Called by
the supervisor at each poll. Pure: keeps what it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import SESSION_PHASES, Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.text import duration_text, join_words, rank_names

UNSEEN_SECONDS = 5.0
"""A longer gap between two polls was not observed and counts for nothing."""
SHOWN_PHASES = 3


@dataclass(kw_only=True)
class _RankInStep:
    """What one rank has done in the step.

    Attributes:
        spent: seconds by innermost phase.
        done: tokens, rewards and time of the last work, as last read.
    """

    spent: dict[Phase, float] = field(default_factory=dict)
    done: tuple[int, int, float] = (0, 0, 0.0)


class StepClock:
    """The clock of one attempt.

    Args:
        settings: bounds of the deadlines.
        now: monotonic seconds; the time before it was not observed.
    """

    def __init__(self, settings: DeadlineSettings, now: float) -> None:
        self._settings = settings
        self.position: tuple[int, int] | None = None
        """The call and the last committed step; None while not all ranks train."""
        self._began = self._moved = self._seen = now
        self._longest = 0.0
        self._ranks: dict[int, _RankInStep] = {}
        self._counted: set[int] = set()
        self._slots: Mapping[int, Slot] = {}

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Take one reading of the board into account."""
        gap, self._seen = now - self._seen, now
        if gap > UNSEEN_SECONDS:
            self._began += gap
            self._moved += gap
            gap = 0.0
        known = {rank: slot for rank, slot in slots.items() if slot is not None}
        training = len(known) == len(slots) and all(
            slot.state is RankState.training for slot in known.values()
        )
        position = _position(known) if known and training else None
        if position is None or position != self.position:
            if position is not None and self.position is not None and position[0] == self.position[0]:
                self._longest = max(self._longest, now - self._began)
            self.position, self._began, self._moved = position, now, now
            self._ranks = {}
            gap = 0.0
        self._slots = known
        for rank, slot in known.items():
            self._record_rank(self._ranks.setdefault(rank, _RankInStep(done=_done(slot))), slot, gap, now)

    def _record_rank(self, rank: _RankInStep, slot: Slot, gap: float, now: float) -> None:
        if slot.phase is not None:
            rank.spent[slot.phase] = rank.spent.get(slot.phase, 0.0) + gap
        done = _done(slot)
        if slot.generation_passes or (done[:2] == rank.done[:2] and done != rank.done):
            self._counted.add(slot.rank)
        if done != rank.done or self._is_unknown(slot):
            rank.done, self._moved = done, now

    @property
    def deadline_seconds(self) -> float:
        """How long a step may take without any work that is counted."""
        if not self._longest:
            return self._settings.unlearned_seconds(Phase.startup)
        bounds = self._settings
        # never below what a phase alone may take
        return max(bounds.first_seconds, bounds.ceiling_seconds, bounds.factor_seen * self._longest)

    def stall(self) -> Stall | None:
        """Return the stall of a step in which nothing has moved for the deadline, else None."""
        silent = self._seen - self._moved
        if self.position is None or silent <= self.deadline_seconds:
            return None
        ranks = tuple(sorted(self._slots))
        have = "has" if len(ranks) == 1 else "have"
        return Stall(
            cause=Cause.no_progress,
            culprits=(),
            waiters=ranks,
            phase=self._slots[self._busiest].phase or Phase.forward_backward,
            deadline_seconds=self.deadline_seconds,
            waited_seconds=silent,
            sentence=(
                f"No step was committed for {duration_text(self._seen - self._began)}, and"
                f" {rank_names(ranks)} {have} neither run the model nor scored a reward for"
                f" {duration_text(silent)} (deadline {duration_text(self.deadline_seconds)});"
                f" {self._where()}."
            ),
        )

    def _is_unknown(self, slot: Slot) -> bool:
        """Whether the rank may work in a way that nothing counts.

        In a phase of others, whose own deadline decides, in the generation of another engine, or with a
        compiled model, whose passes are not counted.
        """
        if slot.rank not in self._counted or any(one.phase in SESSION_PHASES for one in slot.phases):
            return True
        return slot.last_work_seconds < (slot.generating_since or 0.0)

    @property
    def _busiest(self) -> int:
        """The rank that has waited least for the others."""
        return min(self._slots, key=lambda rank: (self._ranks[rank].spent.get(Phase.vote, 0.0), rank))

    def _where(self) -> str:
        """Where the time of the busiest rank went."""
        rank = self._busiest
        longest = sorted(self._ranks[rank].spent.items(), key=lambda one: -one[1])[:SHOWN_PHASES]
        parts = [f"{phase.name} {duration_text(seconds)}" for phase, seconds in longest if seconds >= 1.0]
        return f"of rank {rank}: {join_words(parts)}" if parts else "where the time went was not observed"


def _position(slots: Mapping[int, Slot]) -> tuple[int, int] | None:
    calls = {slot.train_call for slot in slots.values()}
    return (calls.pop(), min(slot.voted_step for slot in slots.values())) if len(calls) == 1 else None


def _done(slot: Slot) -> tuple[int, int, float]:
    return slot.tokens_generated, slot.rewards_scored, slot.last_work_seconds
