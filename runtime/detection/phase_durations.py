"""How long phases take in this run, attempt after attempt: what its deadlines are learned from.

Called by `detector.py` and, for the journal and the stragglers, by the supervisor. Reads the board's tallies; does not
judge (`watchdog.stalls.detection`), and remembers nothing beyond this process (the journal does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations, merge_ranks

SHOWN_SECONDS = 2.0
"""How old the tallies may be by which a long phase is judged; it does not end meanwhile."""
PATIENCE_GROWTH = 2.0
"""How much longer a phase may take after it was ended for its deadline once."""


class Shown(NamedTuple):
    """What phases took so far, and which of them each rank has ended in this attempt."""

    learned: dict[Phase, Durations]
    completed: dict[int, frozenset[Phase]]


class Learned:
    """See the module. One a run; `before` is what the attempts before this one have shown.

    Args:
        settings: of the learned deadlines.
    """

    def __init__(self, settings: DeadlineSettings) -> None:
        self._settings = settings
        self.before: dict[Phase, Durations] = {}

    def begin_attempt(self, board: Board, places: Mapping[int, int]) -> None:
        """Forget the last attempt; `places` is each rank's slot."""
        self._board = board
        self._places = dict(places)
        self._shown: tuple[float, Shown] | None = None
        self._ended: tuple[Phase, float] | None = None

    def tallies(self) -> dict[int, dict[Phase, Durations]]:
        """What each rank has counted in this attempt."""
        if not self._board.intact:
            return {}
        return {rank: self._board.tallies(place) for rank, place in self._places.items()}

    def durations(self) -> dict[Phase, Durations]:
        """What this run's ranks have shown so far, this attempt included."""
        learned = dict(self.before)
        tallies = self.tallies()
        for phase in Phase:
            shown = [tally[phase] for tally in tallies.values() if phase in tally]
            if shown:
                now = merge_ranks(shown)
                learned[phase] = learned[phase].then(now) if phase in learned else now
        if self._ended is not None and self._ended[0] in learned:
            # if it was only slow, the next attempt gives it twice as long: `factor_seen` times this length
            phase, seconds = self._ended
            learned[phase] = learned[phase].lasting(PATIENCE_GROWTH * seconds / self._settings.factor_seen)
        return learned

    def shown(self, now: float) -> Shown:
        """Both, read anew every few seconds.

        Args:
            now: monotonic seconds.
        """
        if self._shown is None or now >= self._shown[0] + SHOWN_SECONDS:
            completed = {rank: frozenset(tally) for rank, tally in self.tallies().items()}
            self._shown = now, Shown(self.durations(), completed)
        return self._shown[1]

    def note_ended(self, phase: Phase, seconds: float) -> None:
        """A phase was ended for its deadline after so long."""
        self._ended = phase, seconds
