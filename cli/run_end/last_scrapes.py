"""Keep the exporter running until a regular scraper has read how the run ended.

Called by `launching/supervise.py`. How long is decided in `dashboards/metrics/last_scrape.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from grpo_run.dashboards.metrics.server import MetricsServer
from grpo_run.watchdog.duration_text import duration_text

UNNOTICED_SECONDS = 2.0
"""A longer wait is announced."""
STOP_SECONDS = 20.0
"""After a request to stop, the command has exited by then. Kubernetes and Slurm kill 30 s after their SIGTERM, and the exit
code would be lost."""


def leave_at(stop_signals: Sequence[float], *, stopped: bool) -> float:
    """Return until when a scrape may be waited for, in monotonic seconds.

    Args:
        stop_signals: when this process was asked to stop. A stop that another node asked for leaves no time.
        stopped: whether the run has stopped on request.
    """
    if not stopped:
        return math.inf
    return stop_signals[0] + STOP_SECONDS if stop_signals else -math.inf


def await_last_scrapes(
    server: MetricsServer,
    *,
    ended_at: float,
    until: float,
    notify: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> None:
    """Wait until a regular scraper has read the last state twice, or will not come.

    Args:
        server: of the run's metrics.
        ended_at: when the run ended, in monotonic seconds.
        until: as `leave_at` returns it.
        notify: shows a one-line message.
        interrupted: whether the user wants the command to exit now.
    """
    seconds = min(server.seconds_to_stay(ended_at), until - time.monotonic())
    if seconds <= 0:
        return
    if seconds > UNNOTICED_SECONDS:
        notify(
            f"waiting up to {duration_text(seconds)} until the last state has been scraped (Ctrl-C to exit now)"
        )
    server.await_last_scrapes(ended_at, lambda: interrupted() or time.monotonic() >= until)
