"""Warnings without an action: blind spots of the watchdog, and ranks that others wait for or that are slower.

The supervisor calls these functions at each poll. Every warning appears once per attempt. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from grpo_run.watchdog.callback_names import place_name
from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.progress.late_ranks import LateRank
from grpo_run.watchdog.rank_names import rank_names
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Durations

WarnOnce = Callable[[int, str, str], None]
"""Warns about (rank, subject, text) unless the same rank and subject were warned about before."""

BUSY_SECONDS = 60.0
"""How long a rank may be busy while all others wait before this is reported; more if its phase is usually longer."""
BUSY_FACTOR = 3.0
"""Multiple of a usual long duration of the phase, for the same."""
USUAL_FRACTION = 0.99
SUSPENDED_SECONDS = 5.0
"""How long all ranks have to be stopped before this is reported."""


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


def warn_of_late_ranks(late: Iterable[LateRank], warn_once: WarnOnce) -> None:
    """Warn about ranks that need much longer than the others for the same phase, with the reason as far as it is proved."""
    for one in late:
        warn_once(one.straggler.rank, one.straggler.phase.name, one.sentence)


def warn_of_busy_rank(
    awaited: AwaitedRank | None,
    learned: Mapping[PhaseKey, Durations],
    *,
    ranks: int,
    now: float,
    warn_once: WarnOnce,
) -> None:
    """Warn about a rank that works while all others wait for it, long before it misses its deadline.

    Args:
        awaited: the rank that others wait for; None if there is none.
        learned: durations by phase and callback.
        ranks: number of ranks of this node.
        now: monotonic seconds.
        warn_once: receives the warning.
    """
    if awaited is None or not awaited.busy or len(awaited.waiters) < max(1, ranks - 1):
        return
    durations = learned.get(
        awaited.callback if awaited.phase is Phase.callback else awaited.phase, Durations()
    )
    usual = max(durations.quantile(USUAL_FRACTION), durations.first_seconds)
    waited = now - awaited.since_seconds
    if waited < max(BUSY_SECONDS, BUSY_FACTOR * usual):
        return
    place = place_name(awaited.callback) if awaited.callback else awaited.phase.name
    verb = "waits" if len(awaited.waiters) == 1 else "wait"
    deadline = awaited.deadline_at_seconds - awaited.since_seconds
    warn_once(
        awaited.rank,
        f"busy in {place}",
        f"rank {awaited.rank} has been busy in {place} for {waited:.0f} s while {rank_names(awaited.waiters)} {verb};"
        f" deadline {deadline / 60:.0f} min",
    )


def warn_of_suspension(suspended_since: float | None, *, rank: int, now: float, warn_once: WarnOnce) -> None:
    """Warn that every rank of this node is stopped, as by a scheduler that preempts the job.

    Args:
        suspended_since: since when, in monotonic seconds; None if a rank runs.
        rank: one of them.
        now: monotonic seconds.
        warn_once: receives the warning.
    """
    if suspended_since is not None and now - suspended_since >= SUSPENDED_SECONDS:
        text = (
            "every rank of this node is stopped (SIGSTOP); its deadlines start again when the ranks continue"
        )
        warn_once(rank, "suspended", text)
