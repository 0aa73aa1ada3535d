"""The exporter of a run that has ended stays for a regular scraper, and never beyond a scheduler's
patience.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from grpo_run.cli.launching.on_end import STOP_SECONDS, await_last_scrapes, leave_at
from grpo_run.dashboards.metrics.server import MetricsServer, start
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.status import RunStatus


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """A server that is scraped regularly."""
    status = RunStatus(
        run_id="night", state="stopped", sentence="", history=History(), slots=(), supervisor_pid=None
    )  # fmt: skip
    made = start(lambda: status, "127.0.0.1:0")
    now = time.monotonic()
    made._collector._scrapes.extend([now - 30.0, now])
    yield made
    made.stop(10.0)


@pytest.mark.parametrize(
    ("signals", "stopped", "until"),
    [
        ([], False, math.inf),
        ([100.0], False, math.inf),
        ([100.0, 105.0], True, 100.0 + STOP_SECONDS),
        ([], True, -math.inf),
    ],
)
def test_a_stop_leaves_time_until_the_scheduler_kills(
    signals: list[float], stopped: bool, until: float
) -> None:
    """Counted from the first signal, because saving takes a part of it. Another node's stop leaves none."""
    assert leave_at(signals, stopped=stopped) == until


@pytest.mark.parametrize(("left", "waits"), [(2.5, True), (-1.0, False)])
def test_a_stopped_run_stays_for_a_scraper_within_its_time(
    server: MetricsServer, left: float, waits: bool
) -> None:
    """Without a scrape it leaves when its time is over; a stop that took longer exits at once."""
    said: list[str] = []
    began = time.monotonic()
    await_last_scrapes(
        server, ended_at=began, until=began + left, notify=said.append, interrupted=lambda: False
    )
    assert max(left, 0.0) <= time.monotonic() - began < (20.0 if waits else 2.0)
    assert ["waiting up to" in line for line in said] == [True] * waits
