"""The Prometheus collector: read the run once per scrape, evaluate the metric catalogue and write the page.

Created by `server.py` for the supervisor's status, or for a reader of the run directory. A failed read does
not raise in the scrape and leaves no old values: the run's series are absent and `grpo_observation_failed`
is 1. The names of series, with their labels, are kept as text: most of a scrape is writing them.

It also computes how long the exporter outlives its run, because a finished run and one that was given up
differ only in the last state. Two scrapes are waited for: the first may have begun to read before the end,
and alert rules see a sample only in their next evaluation. Without a regular scraper nothing waits. That
part is pure: clocks are passed in. Does not serve HTTP and keeps no values.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import median

import structlog

from grpo_run.dashboards.metrics.catalogue import EXPORTER_METRICS, RUN_METRICS
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.metrics import RUN_ID, Exporter, Metric, RunObservation, Source
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


EDGES = (*map(repr, HISTOGRAM_EDGES_SECONDS), "+Inf")

log = structlog.get_logger(__name__)


class RunCollector:
    """Prometheus collector for one run. Used by one thread at a time.

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
        self._series: dict[tuple[str, tuple[str, ...]], str] = {}

    def page(self) -> str:
        """Read the run once and return its metrics as Prometheus reads them; a failed read does not raise."""
        self._scrapes.append(self._monotonic())
        lines = self._observed()
        exporter = Exporter(failed=self._failing, failures=self._failures, observed_at=self._observed_at)
        for metric in EXPORTER_METRICS:
            self._write(lines, metric, exporter)
        return "".join(lines)

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

    def _observed(self) -> list[str]:
        """Return the lines of the run; none if it cannot be read. Every failure is counted; the first of
        consecutive failures is logged.
        """
        lines: list[str] = []
        try:
            observation = self._observation(self._read())
            for metric in RUN_METRICS:
                self._write(lines, metric, observation)
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
        return lines

    def _observation(self, status: RunStatus) -> RunObservation:
        if status.run_id != self._run_id:
            self._run_id = status.run_id
            self._series.clear()
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

    def _write(self, lines: list[str], metric: Metric[Source], source: Source) -> None:
        """Append the lines of one metric, with those of its values that are known."""
        name: str = metric.name
        names: tuple[str, ...] = metric.labels
        labels: tuple[str, ...]
        lines.append(f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n")
        for labels, value in metric.samples(source):
            if isinstance(value, Histogram):
                for edge, count in zip(EDGES, accumulate(value.counts), strict=True):
                    self._add(lines, f"{name}_bucket", (*names, "le"), (*labels, edge), count)
                self._add(lines, f"{name}_count", names, labels, sum(value.counts))
                self._add(lines, f"{name}_sum", names, labels, value.sum_seconds)
            elif value is not None and not math.isnan(value):
                self._add(lines, name, names, labels, value)

    def _add(
        self, lines: list[str], name: str, names: tuple[str, ...], labels: tuple[str, ...], value: float
    ) -> None:
        series = self._series.get((name, labels))
        if series is None:
            pairs = sorted(zip((RUN_ID, *names), (self._run_id, *labels), strict=True))
            text = ",".join(f'{label}="{_escaped(own)}"' for label, own in pairs)
            series = self._series[name, labels] = f"{name}{{{text}}}"
        number = float(value)
        if math.isinf(number):
            lines.append(f"{series} {'+Inf' if number > 0 else '-Inf'}\n")
        else:
            lines.append(f"{series} {number!r}\n")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
