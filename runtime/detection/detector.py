"""The watch: looks at slots, processes and collective records, and says when a hang is proved or a deadline has passed.

    looks    ten a second: has any slot moved? Shared memory only.
    polls    only while ranks stand still and one of them is in a collective: Flight Recorders, first after 0.3 s, again
             after 0.1 s, then ever more rarely; what is unchanged over two polls goes to `watchdog.deadlocks.proof`
    clocks   twice a second: open phases against their learned deadlines, `watchdog.stalls.detection`

Every decision is a pure function of what was read; this file reads, remembers between looks, and forgets
everything when a new attempt begins. What it could not see is in `blind`, and is never a reason to kill. The
supervisor calls it; it ends no process and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection import flight_recorder
from grpo_run.runtime.detection.activity import Activity
from grpo_run.runtime.detection.exit_hangs import Leftovers
from grpo_run.runtime.detection.phase_durations import Learned
from grpo_run.watchdog import processes
from grpo_run.watchdog.deadlocks.collectives import Collective, Progress, merge, parse_recorder
from grpo_run.watchdog.deadlocks.proof import Deadlock, Position, prove
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.detection import InnerTime, ProcessFacts, Stall, find
from grpo_run.watchdog.verdicts.failure import all_done

STILL_SECONDS = 0.3
"""A slot that has not moved for this long is worth a poll, when its rank is in a collective."""
SECOND_POLL_SECONDS = 0.1
SLOWEST_POLL_SECONDS = 5.0
CLOCK_SECONDS = 0.5
FETCH_SECONDS = 0.5
BLINDED_SECONDS = 2.0
"""A supervisor that did not look for this long was itself stopped: what ranks did meanwhile counts for nothing."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the watch is sure of: exactly one of `deadlock` and `stall`.

    `began_at_seconds` is when it began by the ranks' own marks (monotonic). What the Flight Recorders said is `Watch.recorder`.
    """

    deadlock: Deadlock | None = None
    stall: Stall | None = None
    began_at_seconds: float


@dataclass(kw_only=True)
class _Poll:
    """What one poll saw; two that are equal over time make a proof."""

    movement: tuple[object, ...]
    recorded: dict[int, tuple[Collective, ...]]
    main: dict[int, processes.MainThread | None]


class Watch:
    """See the module.

    Args:
        board: read only.
        settings: of the learned deadlines.
        clock: monotonic seconds, as the ranks' own.
    """

    def __init__(
        self, board: Board, settings: DeadlineSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._settings = settings
        self._clock = clock
        self.learned = Learned(settings)
        self.begin_attempt(board, {}, {}, {}, 0)

    def begin_attempt(
        self,
        board: Board,
        places: Mapping[int, int],
        pids: Mapping[int, int],
        sockets: Mapping[int, str],
        world_size: int,
    ) -> None:
        """Forget the last attempt; `places` is each rank's slot, `pids` and `sockets` are by rank too."""
        now = self._clock()
        self._board = board
        self._places = dict(places)
        self._pids = dict(pids)
        self._sockets = dict(sockets)
        self._world_size = world_size
        self.learned.begin_attempt(board, places)
        self._moved: dict[int, tuple[object, float]] = {}
        self._looked_at = now
        self._not_before = now
        self._poll_at = 0.0
        self._last_poll: _Poll | None = None
        self._inside: set[int] = set()
        self._clocks_at = 0.0
        self._parsed: dict[int, tuple[bytes, tuple[Collective, ...]]] = {}
        self._stalled: str | None = None
        self._deadlocked: str | None = None
        self._leftovers = Leftovers(self._settings)
        self._inner = InnerTime()
        self._activity = Activity()
        self.blind: dict[int, str] = {}
        self.recorder: dict[int, bytes] = {}

    @property
    def suspicion(self) -> str | None:
        """What may be wrong, and is being confirmed."""
        return self._deadlocked or self._stalled

    def look(self, slots: Mapping[int, Slot | None]) -> Finding | None:
        """One look. A finding is returned once it is confirmed; before that, there is a `suspicion`."""
        now = self._clock()
        if now - self._looked_at > BLINDED_SECONDS:
            self._not_before, self._moved, self._last_poll = now, {}, None
            self._stalled = self._deadlocked = None
            self._leftovers.forget()
        self._looked_at = now
        self._note_movement(slots, now)
        self._activity.note(slots, now)
        self._inner = self._inner.after(slots, now)
        if all_done(list(slots.values())):
            self._stalled = self._deadlocked = None
            left = self._leftovers.look(slots, self._pids, now)
            if left is None:
                return None
            return Finding(stall=left, began_at_seconds=now - left.waited_seconds)
        return self._proof(slots, now) or self._overdue(slots, now)

    def positions(self, slots: Mapping[int, Slot | None], gone: Mapping[int, bool]) -> dict[int, Position]:
        """Where every rank stands in its collectives, as far as can be seen now; for a fault that exits tell of."""
        living = {rank: path for rank, path in self._sockets.items() if not gone.get(rank)}
        recorded = self._fetch(living)
        return {
            rank: self._position(rank, slots.get(rank), recorded.get(rank), gone.get(rank, False), idle=False)
            for rank in self._places
        }

    def notes(self) -> dict[int, object]:
        """Each rank's last notes, as plain values for a file."""
        if not self._board.intact:
            return {}
        return {
            rank: [_plain(one) for one in self._board.notes(place)] for rank, place in self._places.items()
        }

    # inside

    def _note_movement(self, slots: Mapping[int, Slot | None], now: float) -> None:
        for rank, slot in slots.items():
            if slot is None:
                self.blind[rank] = "its slot on the board cannot be read"
                continue
            if self.blind.get(rank, "").startswith("its slot"):
                del self.blind[rank]
            mark = (slot.pid, slot.writes, slot.notes, slot.counted_seconds)
            if self._moved.get(rank, (None, 0.0))[0] != mark:
                self._moved[rank] = (mark, now)

    def _still_seconds(self, rank: int, now: float) -> float:
        return now - self._moved[rank][1] if rank in self._moved else 0.0

    def _in_collective(self, rank: int, slot: Slot | None) -> bool:
        """The rank's slot says that it waits for others, or that it may from inside a backward."""
        if slot is None:
            return False
        inside = self._board.in_collective(self._places[rank], slot.notes)
        return inside or slot.phase is Phase.forward_backward

    def _proof(self, slots: Mapping[int, Slot | None], now: float) -> Finding | None:
        still = [rank for rank in slots if self._still_seconds(rank, now) >= STILL_SECONDS]
        inside = {rank for rank in still if self._in_collective(rank, slots[rank])}
        # one rank alone that waits for others at work is late at most, unless nobody else is left
        if not inside or (len(still) < 2 and len(self._pids) > 1):
            # ranks that have stood still since the last poll keep their rarity: who joins them is polled for at once
            self._last_poll, self._deadlocked = None, None
            self._inside &= inside
            if not self._inside:
                self._poll_at = 0.0
            return None
        if inside - self._inside:
            self._poll_at = 0.0  # somebody has come to stand still since the last poll: look again at once
        if now < self._poll_at:
            return None
        self._inside = inside
        poll = self._poll(slots)
        last, self._last_poll = self._last_poll, poll
        unchanged = last is not None and (last.movement, last.recorded) == (poll.movement, poll.recorded)
        deadlock = self._prove(slots, last if unchanged else None, poll)
        self._deadlocked = deadlock.sentence if deadlock is not None else None
        if deadlock is None:
            longest = max(self._still_seconds(rank, now) for rank in still)
            self._poll_at = now + min(SLOWEST_POLL_SECONDS, max(SECOND_POLL_SECONDS, longest))
            if last is None:
                self._poll_at = now + SECOND_POLL_SECONDS
            return None
        if not unchanged:
            self._poll_at = now + SECOND_POLL_SECONDS
            return None
        began = max(self._moved[rank][1] for rank in deadlock.at if rank in self._moved)
        return Finding(deadlock=deadlock, began_at_seconds=began)

    def _poll(self, slots: Mapping[int, Slot | None]) -> _Poll:
        alive = {rank: path for rank, path in self._sockets.items() if rank in slots}
        return _Poll(
            movement=self._movement(slots),
            recorded=self._fetch(alive),
            main={rank: processes.read_main_thread(pid) for rank, pid in self._pids.items()},
        )

    def _movement(self, slots: Mapping[int, Slot | None]) -> tuple[object, ...]:
        return tuple(self._moved.get(rank, (None,))[0] for rank in sorted(slots))

    def _fetch(self, sockets: Mapping[int, str]) -> dict[int, tuple[Collective, ...]]:
        self.recorder, failures = flight_recorder.fetch(sockets, FETCH_SECONDS)
        recorded = {}
        for rank, text in self.recorder.items():
            before = self._parsed.get(rank)
            if before is not None and before[0] == text:
                # ranks that stand still answer alike: reading it again costs most of a poll
                recorded[rank] = before[1]
                continue
            try:
                recorded[rank] = parse_recorder(text)
                self._parsed[rank] = (text, recorded[rank])
            except ValueError as error:
                failures[rank] = str(error)
        self.blind = {rank: why for rank, why in self.blind.items() if why.startswith("its slot")}
        self.blind.update({rank: f"no collective records: {why}" for rank, why in failures.items()})
        return recorded

    def _prove(self, slots: Mapping[int, Slot | None], last: _Poll | None, poll: _Poll) -> Deadlock | None:
        positions = {}
        for rank, slot in slots.items():
            before = last.main.get(rank) if last is not None else None
            after = poll.main.get(rank)
            # of two polls a tenth of a second apart, one tick of 10 ms is the clock's own grain; a thread that is
            # runnable has used nothing because others have the processor
            idle = (
                before is not None
                and after is not None
                and before.state == after.state == "S"
                and after.cpu_seconds - before.cpu_seconds <= 0.011
            )
            # a script past its last line may still have threads that meet the others
            gone = rank not in self._pids
            positions[rank] = self._position(rank, slot, poll.recorded.get(rank), gone, idle=idle)
        return prove(positions, world_size=self._world_size)

    def _position(
        self,
        rank: int,
        slot: Slot | None,
        recorded: tuple[Collective, ...] | None,
        gone: bool,
        *,
        idle: bool,
    ) -> Position:
        notes = self._board.notes(self._places[rank]) if slot is not None else None
        # a living rank whose recorder is silent may have issued more than its notes tell
        known = notes is not None and (recorded is not None or gone)
        return Position(
            rank=rank,
            records=merge(recorded or (), notes or ()) if known else None,
            gone=gone,
            left_training=slot is not None and slot.state is RankState.between,
            idle=idle,
            in_backward=slot is not None and slot.phase is Phase.forward_backward,
        )

    def rank_left(self, rank: int) -> None:
        """A rank's process has ended."""
        self._pids.pop(rank, None)
        self._sockets.pop(rank, None)

    def _overdue(self, slots: Mapping[int, Slot | None], now: float) -> Finding | None:
        if now < self._clocks_at:
            return None
        self._clocks_at = now + CLOCK_SECONDS
        oldest = min(
            (
                slot.phases[0].since_seconds if slot.phases else slot.last_progress_seconds
                for slot in slots.values()
                if slot is not None
            ),
            default=now,
        )
        if now - max(oldest, self._not_before) < self._settings.floor_seconds / 2:
            self._stalled = None
            return None
        facts = self._activity.look(slots, self._pids, now)
        # first as if whoever is not known to wait did not; that asks nobody
        if self._find_stall(slots, now, facts, None) is None:
            self._stalled = None
            return None
        # worth a fetch now: who waits inside C++ or on a device only the recorders know
        sockets = {rank: path for rank, path in self._sockets.items() if rank in slots}
        last = self._last_poll
        fresh = last is None or last.movement != self._movement(slots)
        recorded = self._fetch(sockets) if fresh or last is None else last.recorded
        stall = self._find_stall(slots, now, facts, recorded)
        if stall is not None and not fresh:
            # what the last poll read may have been true then only: a device gets on without a slot that moves
            stall = self._find_stall(slots, now, facts, self._fetch(sockets))
        if stall is None:
            self._stalled = None
            self._clocks_at = now + SLOWEST_POLL_SECONDS
            return None
        confirmed, self._stalled = self._stalled is not None, stall.sentence
        if not confirmed:
            self._clocks_at = now  # by the next look: a single one may have met a rank on its way
            return None
        self.learned.note_ended(stall.phase, stall.waited_seconds)
        return Finding(stall=stall, began_at_seconds=now - stall.waited_seconds)

    def _find_stall(
        self,
        slots: Mapping[int, Slot | None],
        now: float,
        facts: Mapping[int, ProcessFacts | None],
        recorded: Mapping[int, tuple[Collective, ...]] | None,
    ) -> Stall | None:
        """Args:
        recorded: what was fetched; None to take ranks for working unless they are known to wait.
        """
        learned, completed = self.learned.shown(now)
        waits = {
            rank: self._waits(rank, slot, recorded.get(rank) if recorded is not None else ())
            for rank, slot in slots.items()
        }
        return find(
            slots,
            now=now,
            learned=learned,
            completed=completed,
            settings=self._settings,
            processes=facts,
            progress={rank: self._progressed_at(rank, slots.get(rank)) for rank in slots},
            waiting={rank: waiting for rank, waiting in waits.items() if waiting is not None},
            inner=self._inner,
            whole_world=len(slots) == self._world_size,
        )

    def _waits(self, rank: int, slot: Slot | None, recorded: tuple[Collective, ...] | None) -> bool | None:
        """Whether the rank is blocked in a collective; None where only its recorder could tell, and has not."""
        if slot is None:
            return None
        if self._board.blocked(self._places[rank]):
            return True
        if slot.phase is not Phase.forward_backward and not self._board.in_collective(
            self._places[rank], slot.notes
        ):
            return False
        if recorded is None:
            return None
        return any(one.progress is not Progress.completed for one in recorded)

    def _progressed_at(self, rank: int, slot: Slot | None) -> float:
        counted = slot.counted_seconds if slot is not None else 0.0
        return max(self._not_before, counted, self._activity.alive_at(rank))


def _plain(one: Collective) -> dict[str, object]:
    return {
        "group": one.group,
        "sequence": one.sequence,
        "operation": one.operation,
        "sizes": one.sizes,
        "dtypes": one.dtypes,
        "progress": one.progress.name,
        "step": one.step,
        "at": one.location.short if one.location is not None else None,
    }
