"""The present wait of a run, as one line: `waiting for rank 1: reward, 6 min (deadline 27 min)`.

A wait that every step has is not shown, so that a healthy run does not alternate between two texts. Called by
the status and the terminal. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.text import duration_text, place_name, rank_names

SHORTEST_SECONDS = 5.0
"""Ranks wait for one another in every step."""
DEADLINE_SHARE = 0.2
"""A fifth of a learned deadline is the longest duration that the phase has had, or more."""
SHORTEST_SILENCE_SECONDS = 10.0
"""Without a rank that is known to be waited for, there may be work that is not observed."""


@dataclass(frozen=True, kw_only=True)
class WaitLine:
    """A wait that is worth showing. `key` stays equal while the same is waited for."""

    text: str
    key: Hashable

    @property
    def sentence(self) -> str:
        """The text as a sentence."""
        return f"{self.text[0].upper()}{self.text[1:]}."


def find_wait(
    awaited: AwaitedRank | None, slots: Sequence[Slot | None], *, now: float, step_seconds: float | None
) -> WaitLine | None:
    """Return the present wait; None while there is none, or none that is longer than usual.

    Args:
        awaited: the rank that the others wait for.
        slots: of all local ranks, for a run in which nothing moves and no rank is known to be waited for.
        now: monotonic seconds.
        step_seconds: how long a step usually takes; None if unknown.
    """
    if awaited is None:
        return _find_silence(slots, now=now, step_seconds=step_seconds)
    seconds = now - awaited.since_seconds
    usual = min(step_seconds or 0.0, DEADLINE_SHARE * awaited.deadline_seconds)
    if seconds < max(SHORTEST_SECONDS, usual):
        return None
    return WaitLine(text=waiting_text(awaited, now), key=(awaited.rank, awaited.phase, awaited.callback))


def waiting_text(awaited: AwaitedRank, now: float) -> str:
    """Return who is waited for, where, for how long and until when."""
    where = place_name(awaited.callback) if awaited.callback else _name(awaited.phase)
    if awaited.exiting:
        where = "exit after its last line"
    where += f" at {awaited.place}" if awaited.place else ""
    to = f", connected to {awaited.outside}" if awaited.outside else ""
    deadline = awaited.deadline_seconds
    limit = f" (deadline {duration_text(deadline)})" if math.isfinite(deadline) else ""
    return (
        f"waiting for rank {awaited.rank}: {where}, {duration_text(now - awaited.since_seconds)}{limit}{to}"
    )


def _name(phase: Phase) -> str:
    return "outside train()" if phase is Phase.idle else phase.name


def _find_silence(slots: Sequence[Slot | None], *, now: float, step_seconds: float | None) -> WaitLine | None:
    """Nothing moves: all ranks work, or it is not known which of them waits."""
    seen = [slot for slot in slots if slot is not None]
    if not seen or len(seen) < len(slots) or any(slot.state is not RankState.training for slot in seen):
        return None
    since = max(max(slot.last_progress_seconds, slot.last_work_seconds) for slot in seen)
    if now - since < max(SHORTEST_SILENCE_SECONDS, 2 * (step_seconds or 0.0)):
        return None
    return WaitLine(
        text=f"no progress for {duration_text(now - since)}{_places(seen)}", key=("silence", since)
    )


def _places(slots: Sequence[Slot]) -> str:
    """Where ranks are that do not move, as far as it fits into a line."""
    ranks: dict[str, list[int]] = {}
    for slot in slots:
        if slot.phase is not None:
            ranks.setdefault(_name(slot.phase), []).append(slot.rank)
    if len(ranks) == 1:
        return f" in {next(iter(ranks))}"
    if len(ranks) != 2:
        return ""
    return ": " + ", ".join(f"{rank_names(listed)} in {phase}" for phase, listed in ranks.items())
