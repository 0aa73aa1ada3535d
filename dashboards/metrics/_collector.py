"""The Prometheus collector: read the run once per scrape and evaluate the metric catalogue.

Created by `server.py` for the supervisor's status, or for a reader of the run directory. A failed read does
not raise in the scrape and leaves no old values: the run's series are absent and `grpo_observation_failed`
is 1.

It also computes how long the exporter outlives its run, because a finished run and one that was given up
differ only in the last state. Two scrapes are waited for: the first may have begun to read before the end,
and alert rules see a sample only in their next evaluation. Without a regular scraper nothing waits. That
part is pure: clocks are passed in. Does not serve HTTP and does not cache.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from grpo_run.dashboards.metrics.catalogue import EXPORTER_METRICS, RUN_METRICS
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.metrics import RUN_ID, Exporter, Kind, Metric, RunObservation, Source
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.stalls.durations import HISTOGRAM_EDGES_SECONDS, Histogram

KEPT_SCRAPES = 6
LAST_SCRAPES = 2
"""How many scrapes read the last state."""
LONGEST_STAY_SECONDS = 90.0
"""The exporter stays this long at most, for all of the last scrapes together."""
LONGEST_INTERVAL_SECONDS = 60.0
"""Prometheus' default scrape interval. A run does not stay for scrapers that come less often."""
LATENESS = 1.25
"""A scrape may come this much later than usual, and a second: the scraper and the node are busy too."""


def wait_seconds(scrapes: Sequence[float], now: float, *, announced: bool = False) -> float:
    """Return how long to wait for the next scrape; 0 if none is to be expected.

    Args:
        scrapes: times of the last scrapes in ascending order, in monotonic seconds.
        now: monotonic seconds.
        announced: a scraper has named itself, so that even a single scrape is one of a regular scraper.
    """
    if not scrapes or (len(scrapes) < 2 and not announced):
        return 0.0
    interval = (
        median(later - earlier for earlier, later in pairwise(scrapes))
        if len(scrapes) > 1
        else LONGEST_INTERVAL_SECONDS
    )
    if interval > LONGEST_INTERVAL_SECONDS:
        return 0.0
    return max(0.0, scrapes[-1] + LATENESS * interval + 1.0 - now)


def stay_seconds(scrapes: Sequence[float], now: float, *, ended_at: float, announced: bool = False) -> float:
    """Return how long the exporter of a run that has ended stays for the next scrape; 0 once it may leave.

    Args:
        scrapes, now, announced: as of `wait_seconds`.
        ended_at: when the run ended, in monotonic seconds.
    """
    if sum(scrape >= ended_at for scrape in scrapes) >= LAST_SCRAPES:
        return 0.0
    left = max(0.0, ended_at + LONGEST_STAY_SECONDS - now)
    return min(left, wait_seconds(scrapes, now, announced=announced))


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
KINDS: dict[Kind, type[Family]] = {
    "counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily,
}  # fmt: skip
EDGES = (*map(repr, HISTOGRAM_EDGES_SECONDS), "+Inf")

log = structlog.get_logger(__name__)


class RunCollector(Collector):
    """Prometheus collector for one run. Used by one thread.

    Args:
        read: returns the run's status; any exception counts as a failed observation.
        monotonic: clock of the timestamps on the board, in seconds.
        wall: clock of the timestamps in the journal, in seconds since the epoch.
    """

    def __init__(
        self,
        read: Callable[[], RunStatus],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self._monotonic = monotonic
        self._wall = wall
        self._run_id = ""
        self._first_rank = 0
        self._rank_count = 0
        self._failures = 0
        self._failing = False
        self._observed_at: float | None = None
        self._scrapes: deque[float] = deque(maxlen=KEPT_SCRAPES)
        self._announced = False
        self.registry = CollectorRegistry(auto_describe=False)  # which would read the run
        self.registry.register(self)

    def collect(self) -> Iterator[Family]:
        """Read the run once and yield its metric families; a failed read does not raise."""
        self._scrapes.append(self._monotonic())
        yield from self._observed()
        exporter = Exporter(failed=self._failing, failures=self._failures, observed_at=self._observed_at)
        for metric in EXPORTER_METRICS:
            yield self._family(metric, exporter)

    def announce_scraper(self) -> None:
        """Note that a scraper has named itself, so that it will come again."""
        self._announced = True

    def seconds_to_stay(self, ended_at: float) -> float:
        """Return how long to keep answering so that a regular scraper reads the last state; 0 if it has.

        Args:
            ended_at: when the run ended, in monotonic seconds.
        """
        return stay_seconds(
            tuple(self._scrapes), self._monotonic(), ended_at=ended_at, announced=self._announced
        )

    def _observed(self) -> list[Family]:
        """Return the families of the run; none if it cannot be read. Every failure is counted; the first of
        consecutive failures is logged.
        """
        try:
            observation = self._observation(self._read())
            families = [self._family(metric, observation) for metric in RUN_METRICS]
        except Exception:
            self._failures += 1
            if not self._failing:
                log.exception("run_not_observed", run_id=self._run_id)
            self._failing = True
            return []
        if self._failing:
            log.info("run_observed_again", run_id=self._run_id, failures=self._failures)
        self._failing = False
        self._observed_at = observation.wall_seconds
        return families

    def _observation(self, status: RunStatus) -> RunObservation:
        self._run_id = status.run_id
        return RunObservation(
            status=status,
            slots=self._known_slots(status),
            first_rank=self._first_rank,
            monotonic_seconds=self._monotonic(),
            wall_seconds=self._wall(),
        )

    def _known_slots(self, status: RunStatus) -> tuple[Slot | None, ...]:
        # Until the run ends, every rank that was ever read stays exported as unobservable, even if the
        # board can no longer be read. Otherwise a lost rank would disappear from the metrics.
        for index, slot in enumerate(status.slots):
            if slot is not None:
                self._first_rank = slot.rank - index
                break
        if status.slots:
            self._rank_count = len(status.slots)
            return status.slots
        return () if status.history.exit_code is not None else (None,) * self._rank_count

    def _family(self, metric: Metric[Source], source: Source) -> Family:
        family = KINDS[metric.kind](metric.name, metric.help, labels=[RUN_ID, *metric.labels])
        labels: tuple[str, ...]
        for labels, value in metric.samples(source):
            if isinstance(value, Histogram):
                assert isinstance(family, HistogramMetricFamily)
                buckets = list(zip(EDGES, accumulate(value.counts), strict=True))
                family.add_metric([self._run_id, *labels], buckets, value.sum_seconds)
            elif value is not None and not math.isnan(value):
                assert not isinstance(family, HistogramMetricFamily)
                family.add_metric([self._run_id, *labels], value)
        return family
