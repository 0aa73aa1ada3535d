"""The Prometheus collector: reads the run once a scrape and evaluates the catalogue on it.

Built by `server.py` around the supervisor's own view, or around a reader of the run directory. A reading
that fails never reaches the scraper as an exception and never leaves old values behind: the run's series
are then absent and `grpo_observation_failed` is 1. Does not serve and does not cache: every scrape reads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS, EXPORTER_METRICS, RUN_METRICS
from grpo_run.dashboards.metrics.metric import RUN_ID, Exporter, Metric, Observation, Source
from grpo_run.runtime.record.status import RunStatus
from grpo_run.watchdog.observation import Slot

Result = TypeVar("Result")
Family = CounterMetricFamily | GaugeMetricFamily

log = structlog.get_logger(__name__)


class ObservationFailed(Exception):
    """The run could not be read; the cause is chained and already logged and counted."""


class RunCollector(Collector):
    """Exports one run. Thread-safe: readings are made one at a time.

    Args:
        read: gives the run's status; may raise anything, which counts as a failed observation.
        registry: where to register, a new one by default, never the process-wide one.
        monotonic: clock of the board's times, in seconds.
        wall: clock of the journal's times, in seconds since the epoch.
    """

    def __init__(
        self,
        read: Callable[[], RunStatus],
        *,
        registry: CollectorRegistry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self._monotonic = monotonic
        self._wall = wall
        self._lock = threading.Lock()
        self._run_id = ""
        self._first_rank = 0
        self._ranks_seen = 0
        self._failures = 0
        self._failing = False
        self._observed_at: float | None = None
        self.registry = CollectorRegistry(auto_describe=False) if registry is None else registry
        self.registry.register(self)

    def describe(self) -> Iterator[Family]:
        """The families without samples: registering must not read the run."""
        for metric in ALL_METRICS:
            yield _family(metric)

    def collect(self) -> Iterator[Family]:
        """One reading as metric families; never raises because of the run."""
        failed = False
        try:
            yield from self.observe(self._families)
        except ObservationFailed:
            failed = True
        exporter = Exporter(failed=failed, failures=self._failures, observed_at=self._observed_at)
        for metric in EXPORTER_METRICS:
            yield self._filled(metric, exporter)

    def observe(self, evaluate: Callable[[Observation], Result]) -> Result:
        """Read the run once and make something of the reading; both count as the observation.

        Raises:
            ObservationFailed: either raised. It is counted, and logged when it is the first in a row.
        """
        with self._lock:
            try:
                seen = self._observation(self._read())
                result = evaluate(seen)
            except Exception as error:
                self._failures += 1
                if not self._failing:
                    log.exception("run_not_observed", run_id=self._run_id)
                self._failing = True
                raise ObservationFailed(f"{type(error).__name__}: {error}") from error
            if self._failing:
                log.info("run_observed_again", run_id=self._run_id, failures=self._failures)
            self._failing = False
            self._observed_at = seen.wall_seconds
            return result

    def _observation(self, status: RunStatus) -> Observation:
        self._run_id = status.run_id
        return Observation(
            status=status,
            slots=self._known_slots(status),
            first_rank=self._first_rank,
            monotonic_seconds=self._monotonic(),
            wall_seconds=self._wall(),
        )

    def _families(self, seen: Observation) -> list[Family]:
        return [self._filled(metric, seen) for metric in RUN_METRICS]

    def _known_slots(self, status: RunStatus) -> tuple[Slot | None, ...]:
        # A board that can no longer be read must not make its ranks vanish: as long as the run has not
        # ended, every rank that was ever seen is shown, as unobservable.
        for index, slot in enumerate(status.slots):
            if slot is not None:
                self._first_rank = slot.rank - index
                break
        if status.slots:
            self._ranks_seen = len(status.slots)
            return status.slots
        return () if status.history.exit_code is not None else (None,) * self._ranks_seen

    def _filled(self, metric: Metric[Source], source: Source) -> Family:
        family = _family(metric)
        labels: tuple[str, ...]
        for labels, value in metric.read(source):
            if value is not None and not math.isnan(value):
                family.add_metric([self._run_id, *labels], value)
        return family


def _family(metric: Metric[Source]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    stem = metric.name.removesuffix("_total")
    # The exposition appends a unit that is not the name's ending: pass only the one that is.
    unit = metric.unit if metric.unit and stem.endswith(f"_{metric.unit}") else ""
    return kind(metric.name, metric.help, labels=[RUN_ID, *metric.label_names], unit=unit)
