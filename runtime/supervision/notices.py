"""Warnings without an action: blind spots of the watchdog, and ranks that are slower than the others.

The supervisor calls these functions at each poll. Every warning appears once per attempt. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from grpo_run.watchdog.stalls.stragglers import Straggler

WarnOnce = Callable[[int, str, str], None]
"""Warns about (rank, subject, text) unless the same rank and subject were warned about before."""


def warn_of_blind_spots(blind: Mapping[int, str], warn_once: WarnOnce) -> None:
    """Warn about ranks that cannot be observed completely.

    Args:
        blind: by rank, what cannot be observed and why.
        warn_once: receives each warning.
    """
    for rank, reason in blind.items():
        text = (
            f"the watchdog cannot see all of rank {rank}: {reason}; unobserved state is unknown, not healthy"
        )
        warn_once(rank, reason, text)


def warn_of_stragglers(stragglers: Iterable[Straggler], warn_once: WarnOnce) -> None:
    """Warn about ranks that need much longer than the others for the same phase."""
    for straggler in stragglers:
        text = (
            f"rank {straggler.rank} takes {straggler.ratio:.1f} times as long in {straggler.phase.name} as the others"
            f" ({straggler.median_seconds:.2f} s against {straggler.others_seconds:.2f} s)"
        )
        warn_once(straggler.rank, straggler.phase.name, text)
