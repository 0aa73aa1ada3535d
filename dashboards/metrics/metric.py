"""The types of the metric catalogue: a metric as data, its labels, and what it is read from.

`catalogue.py` lists the metrics, `collector.py` evaluates them, `grafana.py` and `alerts.py` look names
and labels up. Holds no metric itself and does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from grpo_run.runtime.record.status import RunStatus
from grpo_run.watchdog.observation import Slot

Kind = Literal["gauge", "counter"]
Unit = Literal["", "seconds", "steps", "tokens", "ratio", "boolean", "count"]
Sample = tuple[tuple[str, ...], float | None]
"""Label values in the order of the metric's labels, and the value; None or NaN is left out."""

RUN_ID = "run_id"
"""The label every series carries, so that one Prometheus can hold many runs."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """One label of a metric.

    `values` is the closed set of its values, or None for one value a local rank. `exclusive` says that one
    value at a time is exported, so that the label does not multiply the series.
    """

    name: str
    values: tuple[str, ...] | None
    exclusive: bool = False


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One successful reading of a run and when it was made.

    `slots` is by local rank, None for a rank that could not be read. `first_rank` is the global rank of
    local rank 0: an unreadable slot does not say whose it is.
    """

    status: RunStatus
    slots: tuple[Slot | None, ...]
    first_rank: int
    monotonic_seconds: float
    wall_seconds: float

    def ranks(self) -> Iterator[tuple[str, Slot | None]]:
        """Every known rank's label and its slot, None when it could not be read."""
        for index, slot in enumerate(self.slots):
            yield str(self.first_rank + index if slot is None else slot.rank), slot

    def readable(self) -> Iterator[tuple[str, Slot]]:
        """The ranks that could be read: what is unreadable has no values, not old ones."""
        for rank, slot in self.ranks():
            if slot is not None:
                yield rank, slot


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """How the exporter itself fares. `observed_at` is the wall time of the last good reading, if any."""

    failed: bool
    failures: int
    observed_at: float | None


Source = TypeVar("Source", Observation, Exporter)


@dataclass(frozen=True, kw_only=True)
class Metric(Generic[Source]):
    """One metric family. `read` is pure: the same source gives the same samples."""

    name: str
    kind: Kind
    help: str
    unit: Unit
    read: Callable[[Source], Iterator[Sample]]
    labels: tuple[Label, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels in the order of a sample's values, `run_id` left out."""
        return tuple(label.name for label in self.labels)

    def most_series(self, local_ranks: int) -> int:
        """The most series one exporter can give for this metric at a time."""
        series = 1
        for label in self.labels:
            if not label.exclusive:
                series *= local_ranks if label.values is None else len(label.values)
        return series


def one_hot(values: Sequence[str], present: str | None) -> Iterator[tuple[str, float]]:
    """Every value with 1 for the present one and 0 for the others."""
    for value in values:
        yield value, float(value == present)
