"""Types of metrics: what one is, its labels, and what it is read from.

The table of the core is `dashboards/metrics/catalogue.py`; a feature has its own in its module `metrics`.
Every label has a closed set of values, one value per local rank, or a bounded number of names, so no content
of a journal or board can add series without limit; a test counts them. A value that cannot be observed is not
exported. Performs no I/O and exports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.rank_metrics import Unit
from grpo_run.watchdog.stalls.durations import Histogram

Kind = Literal["gauge", "counter", "histogram"]
Value = float | Histogram | None
"""None and NaN are not exported."""
Values = Value | Mapping[str, Value] | Mapping[tuple[str, str], Value] | Mapping[tuple[str, str, str], Value]
"""What is read of a metric: one value, or values by the value of its label, or by those of its labels."""

RUN_ID = "run_id"
"""Label of every series, so that one Prometheus server can hold many runs."""


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """One successful read of a run, with the time of the read.

    `slots` is indexed by local rank; None stands for a rank that cannot be read. `first_rank` is the global
    rank of local rank 0, which an unreadable slot does not provide.
    """

    status: RunStatus
    slots: tuple[Slot | None, ...]
    first_rank: int
    monotonic_seconds: float
    wall_seconds: float

    @property
    def history(self) -> History:
        """What the journal says."""
        return self.status.history

    def ranks(self) -> Iterator[tuple[str, Slot | None]]:
        """Yield each known rank's label and slot; the slot is None if it cannot be read."""
        for index, slot in enumerate(self.slots):
            yield str(self.first_rank + index if slot is None else slot.rank), slot

    def readable(self) -> Iterator[tuple[str, Slot]]:
        """Yield only the ranks whose slots can be read; the others export no values."""
        for rank, slot in self.ranks():
            if slot is not None:
                yield rank, slot


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """State of the exporter itself. `observed_at` is the wall time of the last successful read, if any."""

    failed: bool
    failures: int
    observed_at: float | None


Source = TypeVar("Source", RunObservation, Exporter)


@dataclass(frozen=True, kw_only=True)
class Metric(Generic[Source]):
    """One metric family. `read` is pure: equal sources give equal values."""

    kind: Kind
    name: str
    unit: Unit
    read: Callable[[Source], Values]
    help: str
    labels: tuple[str, ...]

    def samples(self, source: Source) -> Iterator[tuple[tuple[str, ...], Value]]:
        """Yield each value with those of its labels, in the order of the metric's labels."""
        found = self.read(source)
        if not isinstance(found, Mapping):
            yield (), found
            return
        for labels, value in found.items():
            yield (labels,) if isinstance(labels, str) else labels, value


def gauge(name: str, unit: Unit, read: Callable[[Source], Values], help: str, *labels: str) -> Metric[Source]:
    """Return a row of a table: a value that rises and falls."""
    return Metric(kind="gauge", name=name, unit=unit, read=read, help=help, labels=labels)


def counter(
    name: str, unit: Unit, read: Callable[[Source], Values], help: str, *labels: str
) -> Metric[Source]:
    """Return a row of a table: a number that only grows, from 0 on."""
    return Metric(kind="counter", name=name, unit=unit, read=read, help=help, labels=labels)


def histogram(name: str, read: Callable[[Source], Values], help: str, *labels: str) -> Metric[Source]:
    """Return a row of a table: how long something took, each time."""
    return Metric(kind="histogram", name=name, unit="seconds", read=read, help=help, labels=labels)


def by_rank(value: Callable[[RunObservation, Slot], float]) -> Callable[[RunObservation], Values]:
    """Read one value per readable rank."""
    return lambda run: {rank: value(run, slot) for rank, slot in run.readable()}


def counted_by_rank(name: str) -> Callable[[RunObservation], Values]:
    """Read what each readable rank has counted, over all attempts."""
    return by_rank(lambda run, slot: run.history.ranks.total(slot.rank, slot.attempt, name, slot.value(name)))
