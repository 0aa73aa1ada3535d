"""The ranks of this node in the current attempt: where to read them, when they moved, how long phases took.

`LocalRanks` addresses them, `SlotMovement` says when each slot last changed, and `PhaseDurations` holds what
deadlines are learned from, over all attempts. Kept by `detector.py` and used by its parts. Reads the phase
histograms on the board; judges nothing and keeps nothing beyond this process (the journal does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import PhaseKey, Slot
from grpo_run.watchdog.stalls.durations import Durations, merge_ranks


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """Where to read each rank of this node; all mappings are by global rank.

    `local_ranks` is the index of each rank's slot. `pids` and `sockets` (of torch's worker servers) lose a
    rank when its process exits. `world_size` counts the ranks of all nodes.
    """

    board: Board
    local_ranks: dict[int, int]
    pids: dict[int, int]
    sockets: dict[int, str]
    world_size: int

    @property
    def are_whole_world(self) -> bool:
        """Whether no rank runs on another node."""
        return len(self.local_ranks) == self.world_size

    def remove(self, rank: int) -> None:
        """Forget the process of a rank that has exited; its slot stays readable."""
        self.pids.pop(rank, None)
        self.sockets.pop(rank, None)


START_SECONDS = 30.0
"""A rank writes its slot within milliseconds if it is forked, and within some seconds as a fresh interpreter.
"""
UNREADABLE_SECONDS = 2.0
"""How long a slot that had been read must be unreadable before it is reported."""


class SlotMovement:
    """Signatures of slots over successive scans.

    One object per attempt. `unreadable` holds the reason for each slot that could not be read. A rank that is
    starting has no slot yet, and is not listed before `START_SECONDS` have passed; a slot that was read
    before, not before `UNREADABLE_SECONDS`. A change is dated by what the rank has written, as far as that
    lies between two scans: scans may be rare, and a rank that stands still is known from the moment it
    stopped.
    """

    def __init__(self) -> None:
        self._moved: dict[int, tuple[object, float]] = {}
        self._first_scan: float | None = None
        self._scanned_at: float | None = None
        self._read_at: dict[int, float] = {}
        self.unreadable: dict[int, str] = {}

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Compare the slots of a scan at `now` (monotonic seconds) with the previous scan."""
        if self._first_scan is None:
            self._first_scan = now
        for rank, slot in slots.items():
            if slot is None:
                if rank in self._read_at:
                    if now - self._read_at[rank] >= UNREADABLE_SECONDS:
                        self.unreadable[rank] = "its slot on the board cannot be read"
                elif now - self._first_scan >= START_SECONDS:
                    self.unreadable[rank] = (
                        f"it has not written its slot on the board for {START_SECONDS:.0f} s"
                    )
                continue
            self._read_at[rank] = now
            self.unreadable.pop(rank, None)
            signature = (slot.pid, slot.writes, slot.collectives_issued, slot.last_work_seconds)
            if self._moved.get(rank, (None, 0.0))[0] != signature:
                self._moved[rank] = (signature, self._changed_at(slot, now))
        self._scanned_at = now

    def _changed_at(self, slot: Slot, now: float) -> float:
        """When a slot changed that has changed since the last scan."""
        written = max(slot.last_progress_seconds, slot.last_work_seconds, slot.last_collective_seconds)
        return written if self._scanned_at is not None and self._scanned_at <= written <= now else now

    def restart(self, now: float) -> None:
        """Forget all signatures: every slot counts as moved at the next scan, at `now` (monotonic
        seconds).
        """
        self._moved.clear()
        self._scanned_at = None
        self._read_at = dict.fromkeys(self._read_at, now)

    def still_seconds(self, rank: int, now: float) -> float:
        """How long the rank's slot has been unchanged; 0 if it was never read."""
        return now - self._moved[rank][1] if rank in self._moved else 0.0

    def moved_at(self, rank: int) -> float | None:
        """When the rank's slot last changed, in monotonic seconds; None if it was never read."""
        return self._moved[rank][1] if rank in self._moved else None

    def signatures(self, slots: Mapping[int, Slot | None]) -> tuple[object, ...]:
        """The current signatures of these ranks, for comparison with a later poll."""
        return tuple(self._moved.get(rank, (None,))[0] for rank in sorted(slots))


REFRESH_SECONDS = 2.0
"""Maximum age of the histograms that a long phase is compared with."""


class LearnedPhases(NamedTuple):
    """Durations by phase and callback, and what each rank has finished in this attempt."""

    durations: dict[PhaseKey, Durations]
    completed: dict[int, frozenset[PhaseKey]]


class PhaseDurations:
    """Durations of one run. `earlier_attempts` holds those of the attempts before the current one."""

    def __init__(self) -> None:
        self.earlier_attempts: dict[PhaseKey, Durations] = {}

    def begin_attempt(self, board: Board, local_ranks: Mapping[int, int]) -> None:
        """Discard the last attempt. `local_ranks` is the slot index of each rank."""
        self._board = board
        self._local_ranks = dict(local_ranks)
        self._cached: tuple[float, LearnedPhases] | None = None
        self._ended: tuple[PhaseKey, float] | None = None

    def by_rank(self) -> dict[int, dict[PhaseKey, Durations]]:
        """Return each rank's durations in this attempt; empty if the board was truncated."""
        if not self._board.has_full_size:
            return {}
        return {rank: self._board.durations(local_rank) for rank, local_rank in self._local_ranks.items()}

    def merged(self) -> dict[PhaseKey, Durations]:
        """Return the durations of all ranks and attempts, including the current one."""
        merged = dict(self.earlier_attempts)
        histograms = self.by_rank().values()
        for key in sorted({key for histogram in histograms for key in histogram}, key=str):
            attempt = merge_ranks(histogram[key] for histogram in histograms if key in histogram)
            merged[key] = merged[key].then(attempt) if key in merged else attempt
        if self._ended is not None:
            key, seconds = self._ended
            merged[key] = merged.get(key, Durations()).ended_after(seconds)
        return merged

    def current(self, now: float) -> LearnedPhases:
        """Return durations and completed phases, at most `REFRESH_SECONDS` old at `now` (monotonic
        seconds).
        """
        if self._cached is None or now >= self._cached[0] + REFRESH_SECONDS:
            completed = {rank: frozenset(histogram) for rank, histogram in self.by_rank().items()}
            self._cached = now, LearnedPhases(self.merged(), completed)
        return self._cached[1]

    def record_end(self, key: PhaseKey, seconds: float) -> None:
        """Record that the attempt is ended because a deadline ended a phase or callback after `seconds`.

        The next attempt then waits several times as long, also if the phase has never been completed.
        """
        self._ended = key, seconds
