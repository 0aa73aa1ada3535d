"""How long the exporter outlives its run for a regular scraper."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_run.dashboards.metrics.last_scrape import wait_seconds
from grpo_run.dashboards.metrics.server import MetricsServer, start


@pytest.mark.parametrize(
    ("scrapes", "now", "seconds"),
    [
        ([], 100.0, 0.0),
        ([90.0], 100.0, 0.0),
        ([85.0, 100.0], 100.0, 19.75),
        ([55.0, 70.0, 85.0, 100.0], 112.0, 7.75),
        ([55.0, 70.0, 85.0, 100.0], 200.0, 0.0),
        ([10.0, 70.0, 85.0, 100.0], 101.0, 18.75),
        ([40.0, 100.0], 130.0, 46.0),
        ([30.0, 100.0], 101.0, 0.0),
        ([99.9, 100.0], 100.5, 0.625),
    ],
)
def test_the_next_scrape_is_expected_at_the_usual_interval(
    scrapes: list[float], now: float, seconds: float
) -> None:
    """A single request is no scraper; one that is overdue has gone; one that is rare is not waited for."""
    assert wait_seconds(scrapes, now) == pytest.approx(seconds)


@pytest.fixture
def server(make_slot: Any, make_status: Any) -> Iterator[MetricsServer]:
    """A server that nobody has scraped yet."""
    made = start(lambda: make_status(make_slot(0)), "127.0.0.1:0")
    yield made
    made.stop(10.0)


def scrape(server: MetricsServer) -> None:
    """Scrape once."""
    with urllib.request.urlopen("http://{}:{}/metrics".format(*server.address), timeout=10) as answer:
        assert answer.status == 200


def test_without_a_scraper_nothing_waits(server: MetricsServer) -> None:
    """One request by hand is none."""
    scrape(server)
    began = time.monotonic()
    server.await_scrape(lambda: False)
    assert time.monotonic() - began < 5.0
    assert server.seconds_to_next_scrape() == 0.0


def test_a_regular_scraper_is_answered_once_more(server: MetricsServer) -> None:
    """The wait ends with its scrape, long before the time by which it would count as gone."""
    server._collector._scrapes.extend([time.monotonic() - 30.0, time.monotonic()])
    thread = threading.Timer(0.5, scrape, [server])
    thread.start()
    began = time.monotonic()
    server.await_scrape(lambda: False)
    assert not thread.is_alive()
    assert time.monotonic() - began < 20.0


def test_a_signal_ends_the_wait(server: MetricsServer) -> None:
    """The user does not want to wait."""
    server._collector._scrapes.extend([time.monotonic() - 30.0, time.monotonic()])
    signals: list[int] = []
    threading.Timer(0.2, signals.append, [2]).start()
    server.await_scrape(lambda: bool(signals))
    assert signals
