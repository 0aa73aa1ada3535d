"""The catalogue is closed, well named and bounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.dashboards.metrics.catalogue import (
    ALL_METRICS,
    CAUSES,
    EXPORTER_METRICS,
    LABELS,
    RUN_METRICS,
    RUN_STATES,
)
from grpo_run.dashboards.metrics.metric import Metric, Observation
from grpo_run.runtime.record.history import Recovery
from grpo_run.runtime.record.status import RunStatus
from grpo_run.watchdog.observation import Phase, Slot


def observed(status: RunStatus) -> Observation:
    """An observation of the status at 1000 s of monotonic time."""
    return Observation(
        status=status, slots=status.slots, first_rank=0, monotonic_seconds=1000.0, wall_seconds=200.0
    )


def samples(name: str, seen: Observation) -> dict[tuple[str, ...], float | None]:
    """What one metric of the catalogue reads."""
    (metric,) = [metric for metric in RUN_METRICS if metric.name == name]
    pairs = list(metric.read(seen))
    assert len({labels for labels, _ in pairs}) == len(pairs), "one series twice"
    return dict(pairs)


def test_names_are_unique() -> None:
    """No name stands for two metrics."""
    assert len(LABELS) == len(ALL_METRICS)


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)
def test_name_follows_the_conventions(metric: Metric[Any]) -> None:
    """Every name has the prefix, counters and only counters end in _total, a time's unit is in its name."""
    assert re.fullmatch(r"grpo_[a-z_]+[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.removesuffix("_total").endswith("_seconds") == (metric.unit == "seconds")
    assert metric.help.endswith(".")
    assert "run_id" not in metric.label_names


def test_labels_do_not_explode() -> None:
    """Eight ranks of one node give fewer series than one ordinary exporter of that node."""
    assert sum(metric.most_series(8) for metric in ALL_METRICS) < 600
    growth = sum(metric.most_series(9) - metric.most_series(8) for metric in ALL_METRICS)
    assert growth == sum(metric.most_series(2) - metric.most_series(1) for metric in ALL_METRICS)
    assert growth < 50


def test_no_metric_gives_more_series_than_it_declares(make_slot: Any, make_status: Any) -> None:
    """The declared bound holds for a full observation, and every label value is in its closed set."""
    seen = observed(make_status(*(make_slot(rank) for rank in range(4))))
    for metric in RUN_METRICS:
        pairs = list(metric.read(seen))
        assert 0 < len(pairs) <= metric.most_series(4), metric.name
        for values, _ in pairs:
            assert len(values) == len(metric.labels), metric.name
            for label, value in zip(metric.labels, values, strict=True):
                assert label.values is None or value in label.values, metric.name


def test_words_outside_the_closed_sets_become_unknown(make_status: Any) -> None:
    """A journal of another version cannot add label values."""
    status = make_status(state="daydreaming")
    status.history.recoveries.append(Recovery(cause="moonlight", rank=None, step=1, action="pray"))
    seen = observed(status)
    assert {key for key, value in samples("grpo_run_state", seen).items() if value} == {("unknown",)}
    assert samples("grpo_incidents_total", seen)[("unknown",)] == 1.0
    assert samples("grpo_last_incident_info", seen) == {("unknown", "undecided", "none"): 1.0}


def test_run_state_is_one_hot_over_all_states(make_status: Any) -> None:
    """Exactly one state is 1, and every state is there."""
    states = samples("grpo_run_state", observed(make_status(state="recovering")))
    assert states == {(state,): float(state == "recovering") for state in RUN_STATES}


def test_stops_are_incidents_and_not_restarts(make_status: Any) -> None:
    """A fault that ended the run counts as an incident only."""
    status = make_status()
    status.history.recoveries.append(Recovery(cause="exception", rank=0, step=7, action="stop"))
    seen = observed(status)
    assert sum(value or 0 for value in samples("grpo_restarts_total", seen).values()) == 1.0
    assert samples("grpo_restarts_total", seen)[("signal", "restart")] == 1.0
    incidents = samples("grpo_incidents_total", seen)
    assert (incidents[("exception",)], incidents[("signal",)], len(incidents)) == (1.0, 1.0, len(CAUSES))


def test_times_of_the_last_fault_are_the_last_known_ones(make_status: Any) -> None:
    """A fault that is not recovered yet does not hide how long the one before took."""
    status = make_status()
    status.history.recoveries.append(
        Recovery(cause="signal", rank=0, step=8, action="", detection_seconds=0.75)
    )
    seen = observed(status)
    assert samples("grpo_last_detection_seconds", seen) == {(): 0.75}
    assert samples("grpo_last_recovery_seconds", seen) == {(): 2.5}
    assert samples("grpo_lost_steps_total", seen) == {(): 1.0}


def test_phase_is_the_innermost_one(make_slot: Any, make_status: Any) -> None:
    """A rank that generates inside `data` is shown as generating, since 10 s."""
    seen = observed(make_status(make_slot(0)))
    phases = samples("grpo_rank_phase", seen)
    assert phases == {("0", phase.name): float(phase is Phase.generate) for phase in Phase}
    assert samples("grpo_rank_phase_age_seconds", seen) == {("0",): 10.0}


def test_a_rank_between_phases_is_in_none(make_slot: Any, make_status: Any) -> None:
    """No open phase: every phase is 0 and there is no age."""
    seen = observed(make_status(make_slot(0, phases=())))
    assert set(samples("grpo_rank_phase", seen).values()) == {0.0}
    assert samples("grpo_rank_phase_age_seconds", seen) == {}


def test_unreadable_rank_has_no_value_but_that_it_is_unreadable(
    make_slot: Callable[..., Slot], make_status: Any
) -> None:
    """Rank 1's slot is None: it appears as unobservable and nowhere else."""
    seen = observed(make_status(make_slot(0), None))
    assert samples("grpo_rank_observable", seen) == {("0",): 1.0, ("1",): 0.0}
    for metric in RUN_METRICS:
        if "rank" in metric.label_names and metric.name != "grpo_rank_observable":
            place = metric.label_names.index("rank")
            assert {values[place] for values, _ in metric.read(seen)} == {"0"}, metric.name


def test_progress_age_is_never_negative(make_slot: Any, make_status: Any) -> None:
    """A slot written after the clock was read is 0 s old."""
    seen = observed(make_status(make_slot(0, last_progress_seconds=1000.5)))
    assert samples("grpo_rank_last_progress_age_seconds", seen) == {("0",): 0.0}


def test_run_and_exporter_metrics_do_not_mix() -> None:
    """What survives a failed reading is exactly what the exporter says of itself."""
    assert {metric.name for metric in EXPORTER_METRICS} == {
        "grpo_observation_failed",
        "grpo_observation_failures_total",
        "grpo_observation_timestamp_seconds",
    }
