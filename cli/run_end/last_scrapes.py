"""Let a regular scraper read how a run has ended, before its exporter exits.

Called by `launch.py`. How long is decided in `dashboards/metrics/last_scrape.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.dashboards.metrics.server import MetricsServer
from grpo_run.runtime.errors import EXIT_STOPPED
from grpo_run.watchdog.duration_text import duration_text

UNNOTICED_SECONDS = 2.0
"""A longer wait is announced."""


def await_last_scrapes(
    server: MetricsServer,
    exit_code: int,
    *,
    ended_at: float,
    notify: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> None:
    """Wait until a regular scraper has read the last state twice, or will not come.

    Args:
        server: of the run's metrics.
        exit_code: of the run. After a stop the node may be taken away at any time, so nothing waits.
        ended_at: when the run ended, in monotonic seconds.
        notify: shows a one-line message.
        interrupted: whether the user wants the command to exit now.
    """
    if exit_code == EXIT_STOPPED:
        return
    seconds = server.seconds_to_stay(ended_at)
    if seconds > UNNOTICED_SECONDS:
        notify(
            f"waiting up to {duration_text(seconds)} until the last state has been scraped (Ctrl-C to exit now)"
        )
    server.await_last_scrapes(ended_at, interrupted)
