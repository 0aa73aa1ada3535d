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


def test_a_stopped_run_stays_for_a_scraper_within_its_time(server: MetricsServer) -> None:
    """Without a scrape it leaves when its time is over, and not after the scraper's interval."""
    said: list[str] = []
    began = time.monotonic()
    await_last_scrapes(
        server, ended_at=began, until=began + 2.5, notify=said.append, interrupted=lambda: False
    )
    assert 2.5 <= time.monotonic() - began < 20.0
    assert "waiting up to" in said[0]


def test_a_stop_that_took_longer_exits_at_once(server: MetricsServer) -> None:
    """Nothing is said and nothing is waited for."""
    said: list[str] = []
    began = time.monotonic()
    await_last_scrapes(
        server, ended_at=began, until=began - 1.0, notify=said.append, interrupted=lambda: False
    )
    assert said == []
    assert time.monotonic() - began < 2.0
