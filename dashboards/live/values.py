"""Every metric of the catalogue with its present values, for the list of the live page, and for charts of it.

Called by `feed.py`. What a chart shows the past of is named with the chart, everything else with the reason
why it has none, so that nothing that is measured is missing on the page. Pure except for the clocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.metrics.catalogue import EXPORTER_METRICS, RUN_METRICS
from grpo_run.runtime.charts import Chart
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.metrics import Metric, RunObservation
from grpo_run.watchdog.stalls.durations import Histogram

MOST_VALUES = 24
"""Of a metric; of the others, only their number is told."""
MOST_LINES = 8
"""Lines of a chart by rank or device; of more, the lowest, mean and highest are drawn."""
REASONS = {
    "gauge": "a present value; its past is in Prometheus only",
    "counter": "a total; its past is in Prometheus only",
    "histogram": "calls and their seconds in all",
}
OF_EXPORTER = "of the exporter at /metrics, not of the run"
_BY_NAME = {metric.name: metric for metric in RUN_METRICS}


def all_values(status: RunStatus, charts: Iterable[Chart]) -> dict[str, Any]:
    """Return a row for each metric that has values, and the names of those that have none."""
    drawn = {name: chart.title for chart in charts for name in chart.metrics or (f"grpo_rank_{chart.key}",)}
    run = _observation(status)
    rows, empty = [], []
    for metric in RUN_METRICS:
        values = list(_values(metric, run))
        if not values:
            empty.append({"name": metric.name, "help": metric.help})
            continue
        where = drawn.get(metric.name)
        rows.append(
            {
                "name": metric.name,
                "help": metric.help,
                "unit": metric.unit,
                "chart": where,
                "why": None if where else REASONS[metric.kind],
                "values": values[:MOST_VALUES],
                "more": max(0, len(values) - MOST_VALUES),
            }
        )
    empty += [{"name": metric.name, "help": OF_EXPORTER} for metric in EXPORTER_METRICS]
    return {"rows": rows, "empty": empty}


def sampled(status: RunStatus, charts: Iterable[Chart]) -> Iterator[tuple[str, float]]:
    """Yield the key and the present value of each line of the charts whose past is not in the journal."""
    run = _observation(status)
    for chart in charts:
        metric = _BY_NAME.get(chart.metrics[0]) if chart.sampled else None
        if metric is None:
            continue
        lines: dict[str, float] = {}
        for labels, value in metric.samples(run):
            if isinstance(value, (int, float)) and math.isfinite(value):
                label = f"/{metric.labels[0]} {labels[0]}" if labels else ""
                lines[label] = lines.get(label, 0.0) + value
        if len(lines) > MOST_LINES:
            every = lines.values()
            lines = {"/lowest": min(every), "/mean": fmean(every), "/highest": max(every)}
        for label, value in lines.items():
            yield chart.key + label, value


def _values(metric: Metric[RunObservation], run: RunObservation) -> Iterator[list[Any]]:
    """The labels and the value of each series; of a boolean with labels, those that are true."""
    for labels, value in metric.samples(run):
        if value is None or (labels and metric.unit == "boolean" and not value):
            continue
        if isinstance(value, Histogram):
            if count := sum(value.counts):
                yield [clean(", ".join((*labels, "calls"))), count]
                yield [clean(", ".join((*labels, "seconds"))), value.sum_seconds]
        elif math.isfinite(value):
            yield [clean(", ".join(labels)), float(value)]


def _observation(status: RunStatus) -> RunObservation:
    return RunObservation(
        status=status,
        slots=status.slots,
        first_rank=next((slot.rank - local for local, slot in enumerate(status.slots) if slot), 0),
        monotonic_seconds=time.monotonic(),
        wall_seconds=time.time(),
    )
