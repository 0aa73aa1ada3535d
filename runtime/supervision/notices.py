"""What a person should know and nobody is ended for: said once an attempt, on the terminal and in the journal.

The supervisor calls it at its looks. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from grpo_run.watchdog.stalls.detection import Straggler


class Notices:
    """Remembers what was said.

    Args:
        warn: told of a rank and a sentence; shows and journals it.
    """

    def __init__(self, warn: Callable[[int, str], None]) -> None:
        self._warn = warn
        self._said: set[tuple[int, str]] = set()

    def begin_attempt(self) -> None:
        """Forget what was said of the last attempt's ranks."""
        self._said.clear()

    def blindness(self, blind: Mapping[int, str]) -> None:
        """What the watch cannot see of a rank, and why."""
        for rank, why in blind.items():
            text = f"the watchdog cannot see all of rank {rank}: {why}; what it cannot see is unknown, not healthy"
            self._once(rank, why, text)

    def stragglers(self, found: Iterable[Straggler]) -> None:
        """Ranks that need much longer than the others for the same work."""
        for one in found:
            text = (
                f"rank {one.rank} takes {one.ratio:.1f} times as long in {one.phase.name} as the others"
                f" ({one.median_seconds:.2f} s against {one.others_seconds:.2f} s)"
            )
            self._once(one.rank, one.phase.name, text)

    def _once(self, rank: int, what: str, text: str) -> None:
        if (rank, what) not in self._said:
            self._said.add((rank, what))
            self._warn(rank, text)
