"""Metrics of collectives: how far each rank is in each process group, and how far the ranks are apart.

A part of the table in `catalogue.py`, which says what holds for all metrics. Known to the supervisor, and
about one scrape old. A rank whose Flight Recorder did not answer has no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpo_run.dashboards.metrics.labels import GROUP, MOST_GROUPS
from grpo_run.runtime.metrics import RANK, Metric, RunObservation, Sample
from grpo_run.watchdog.deadlocks.collectives import DEFAULT_GROUP

OTHER = "other"


def _names(observation: RunObservation) -> dict[str, str]:
    """The label of each group; numbered groups that appear later do not move the others."""
    groups = {group for positions in observation.status.collectives.values() for group in positions}
    ordered = sorted(groups, key=lambda group: (group != DEFAULT_GROUP, len(group), group))
    labels = {group: group if place < MOST_GROUPS else OTHER for place, group in enumerate(ordered)}
    return labels | ({DEFAULT_GROUP: "default"} if DEFAULT_GROUP in labels else {})


def _by_rank(place: int) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read one number per rank and group: enqueued (0) or completed (1). Other groups are added up."""

    def read(observation: RunObservation) -> Iterator[Sample]:
        names = _names(observation)
        for rank, _ in observation.readable():
            totals: dict[str, int] = {}
            for group, position in observation.status.collectives.get(int(rank), {}).items():
                totals[names[group]] = totals.get(names[group], 0) + position[place]
            for name, total in totals.items():
                yield (rank, name), float(total)

    return read


def _gap(observation: RunObservation) -> Iterator[Sample]:
    """Read one value per group that two ranks have; of other groups, the largest."""
    names = _names(observation)
    gaps: dict[str, int] = {}
    for group, name in names.items():
        completed = [
            positions[group][1] for positions in observation.status.collectives.values() if group in positions
        ]
        if len(completed) > 1:
            gaps[name] = max(gaps.get(name, 0), max(completed) - min(completed))
    for name, gap in gaps.items():
        yield (name,), float(gap)


COLLECTIVE_METRICS: tuple[Metric[RunObservation], ...] = (
    Metric(
        name="grpo_collectives_enqueued", kind="gauge", unit="count", labels=(RANK, GROUP), read=_by_rank(0),
        help="Sequence number of the last collective that the rank has enqueued in the process group, in this"
        " attempt; read while metrics are scraped, at most every 5 s.",
    ),
    Metric(
        name="grpo_collectives_completed", kind="gauge", unit="count", labels=(RANK, GROUP), read=_by_rank(1),
        help="Sequence number of the last collective of the process group that has completed on the rank, in"
        " this attempt.",
    ),
    Metric(
        name="grpo_collective_straggler_gap", kind="gauge", unit="count", labels=(GROUP,), read=_gap,
        help="Completed collectives of the node's rank that is ahead in the process group minus those of the"
        " one that is behind. Ranks are not read at exactly one time: a few are no gap.",
    ),
)  # fmt: skip
