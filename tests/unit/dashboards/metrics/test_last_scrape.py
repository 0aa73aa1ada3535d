"""How long the exporter outlives its run for a regular scraper."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_run.dashboards.metrics._collector import stay_seconds, wait_seconds
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


def test_one_scrape_of_a_scraper_that_names_itself_is_enough() -> None:
    """A run that fails within seconds has been scraped once; the interval is not known yet."""
    assert wait_seconds([90.0], 100.0, announced=True) == pytest.approx(66.0)
    assert wait_seconds([], 100.0, announced=True) == 0.0


@pytest.mark.parametrize(
    ("scrapes", "now", "seconds"),
    [
        ([85.0, 100.0], 101.0, 18.75),
        ([70.0, 85.0, 100.0, 115.0], 116.0, 18.75),
        ([85.0, 100.0, 115.0, 130.0], 130.5, 0.0),
        ([85.0, 100.0], 119.8, 0.0),
        ([40.0, 99.0, 159.0], 160.0, 31.0),
    ],
)
def test_two_scrapes_read_the_last_state(scrapes: list[float], now: float, seconds: float) -> None:
    """The run ended at 101 s. A scraper that is gone, or too slow, is not waited for without end."""
    assert stay_seconds(scrapes, now, ended_at=101.0) == pytest.approx(seconds)


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
    server.await_last_scrapes(began, lambda: False)
    assert time.monotonic() - began < 5.0


def test_a_regular_scraper_is_answered_twice_more(server: MetricsServer) -> None:
    """The wait ends with its second scrape, long before the time by which it would count as gone."""
    began = time.monotonic()
    server._collector._scrapes.extend([began - 30.0, began - 0.001])
    scrapes = [threading.Timer(seconds, scrape, [server]) for seconds in (0.2, 0.8)]
    for thread in scrapes:
        thread.start()
    server.await_last_scrapes(began, lambda: False)
    assert not any(thread.is_alive() for thread in scrapes)
    assert time.monotonic() - began < 20.0


def test_prometheus_names_itself(server: MetricsServer) -> None:
    """By a header that no browser sends."""
    request = urllib.request.Request(
        "http://{}:{}/metrics".format(*server.address), headers={"X-Prometheus-Scrape-Timeout-Seconds": "10"}
    )
    with urllib.request.urlopen(request, timeout=10):
        pass
    assert server.seconds_to_stay(time.monotonic()) > 30.0


def test_a_signal_ends_the_wait(server: MetricsServer) -> None:
    """The user does not want to wait."""
    server._collector._scrapes.extend([time.monotonic() - 30.0, time.monotonic()])
    signals: list[int] = []
    threading.Timer(0.2, signals.append, [2]).start()
    server.await_last_scrapes(time.monotonic(), lambda: bool(signals))
    assert signals
