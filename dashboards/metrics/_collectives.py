"""Metrics of collectives: how far each rank is in each process group, and how far the ranks are apart.

A part of the table in `catalogue.py`, which says what holds for all metrics. Known to the supervisor, and
about one scrape old. A rank whose Flight Recorder did not answer has no samples.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.metrics import Metric, RunObservation, Values, gauge
from grpo_run.watchdog.deadlocks.collectives import DEFAULT_GROUP

OTHER = "other"
MOST_GROUPS = 8
"""Process groups with a name of their own; further ones are one."""


def _names(run: RunObservation) -> dict[str, str]:
    """The label of each group; numbered groups that appear later do not move the others."""
    groups = {group for positions in run.status.collectives.values() for group in positions}
    ordered = sorted(groups, key=lambda group: (group != DEFAULT_GROUP, len(group), group))
    labels = {group: group if place < MOST_GROUPS else OTHER for place, group in enumerate(ordered)}
    return labels | ({DEFAULT_GROUP: "default"} if DEFAULT_GROUP in labels else {})


def _position(place: int) -> Callable[[RunObservation], Values]:
    """Read one number per rank and group: enqueued (0) or completed (1). Other groups are added up."""

    def read(run: RunObservation) -> Values:
        names = _names(run)
        totals: dict[tuple[str, str], int] = {}
        for rank, _ in run.readable():
            for group, position in run.status.collectives.get(int(rank), {}).items():
                key = rank, names[group]
                totals[key] = totals.get(key, 0) + position[place]
        return totals

    return read


def _gap(run: RunObservation) -> Values:
    """Read one value per group that two ranks have; of other groups, the largest."""
    gaps: dict[str, int] = {}
    for group, name in _names(run).items():
        completed = [
            positions[group][1] for positions in run.status.collectives.values() if group in positions
        ]
        if len(completed) > 1:
            gaps[name] = max(gaps.get(name, 0), max(completed) - min(completed))
    return gaps


COLLECTIVE_METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_collectives_enqueued", "count", _position(0),
          "Sequence number of the last collective that the rank has enqueued in the process group, in this"
          " attempt; read while metrics are scraped, at most every 5 s.", "rank", "group"),
    gauge("grpo_collectives_completed", "count", _position(1),
          "Sequence number of the last collective of the process group that has completed on the rank, in"
          " this attempt.", "rank", "group"),
    gauge("grpo_collective_straggler_gap", "count", _gap,
          "Completed collectives of the node's rank that is ahead in the process group minus those of the"
          " one that is behind. Ranks are not read at exactly one time: a few are no gap.", "group"),
)  # fmt: skip
