"""How long one call of a tool or environment may take. Pure.

The limit is the hang detector's for the same call (`watchdog.stalls.deadlines`), shortened so that the call
ends before the attempt. It is never below what the detector grants a rank with a connection to outside,
because what a tool waits for there cannot be seen. Called by `_calls.py`.
"""

from __future__ import annotations

import math

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations

BELOW_WATCHDOG = 0.8
"""Share of the hang detector's deadline."""
ASYNCHRONOUS_SECONDS = 240.0
"""For an asynchronous tool, and for one in a worker of which nothing is known: less than a rank may wait for
a process outside the job."""


def limit_seconds(
    given_seconds: float | None,
    durations: Durations,
    settings: DeadlineSettings,
    *,
    asynchronous: bool = False,
) -> float:
    """Return how long the next call may take; infinite for no limit.

    Args:
        given_seconds: what the user has set; 0 for no limit, None to learn it.
        durations: of the calls that have returned, in all attempts.
        settings: bounds of the hang detector.
        asynchronous: the call is cancelled in an event loop, not interrupted in the main thread.
    """
    if given_seconds is not None:
        return given_seconds or math.inf
    if asynchronous:
        return ASYNCHRONOUS_SECONDS
    learned = deadline_seconds(Phase.callback, durations, Occurrence.later, settings)
    return BELOW_WATCHDOG * max(learned, settings.outside_limit_seconds)


def idle_seconds(
    limit: float, given_seconds: float | None, durations: Durations, settings: DeadlineSettings
) -> float:
    """Return how long a call may do nothing that can be seen: it may wait for a lock, a file or a person.

    As long as it may take; that of which nothing is known is less, and that without a limit is finite.

    Args: as for `limit_seconds`.
    """
    if given_seconds is None and not durations.observed:
        return min(limit, ASYNCHRONOUS_SECONDS)
    return settings.ceiling_seconds if math.isinf(limit) else limit
