"""The collector exports what was observed, and says so when nothing was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS
from grpo_run.dashboards.metrics.collector import ObservationFailed, RunCollector
from grpo_run.runtime.record.status import RunStatus
from grpo_run.watchdog.observation import RankState

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Script:
    """A `read` that returns or raises one thing after the other, the last one for ever."""

    def __init__(self, *results: RunStatus | Exception) -> None:
        self.results = list(results)
        self.reads = 0

    def __call__(self) -> RunStatus:
        self.reads += 1
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result


def collector_of(*results: RunStatus | Exception) -> RunCollector:
    """A collector over a script, with clocks that stand still at 1000 s and 200 s."""
    return RunCollector(Script(*results), monotonic=lambda: 1000.0, wall=lambda: 200.0)


def scrape(collector: RunCollector) -> Series:
    """One scrape through the text format and back."""
    families = text_string_to_metric_families(generate_latest(collector.registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float | None:
    """The value of one series of the run `night`, or None when it is not exported."""
    return series.get((name, frozenset({"run_id": "night", **labels}.items())))


def names(series: Series) -> set[str]:
    """The metric names of a scrape."""
    return {name for name, _ in series}


def test_values_arrive_with_run_and_rank(make_slot: Any, make_status: Any) -> None:
    """Run values and rank values come out under their labels."""
    series = scrape(collector_of(make_status(make_slot(0), make_slot(1, voted_step=6))))
    assert value(series, "grpo_step") == 7
    assert value(series, "grpo_target_steps") == 100
    assert value(series, "grpo_attempts_total") == 2
    assert value(series, "grpo_checkpoint_step") == 5
    assert value(series, "grpo_restarts_total", cause="signal", action="restart") == 1
    assert value(series, "grpo_rank_voted_step", rank="1") == 6
    assert value(series, "grpo_rank_last_progress_age_seconds", rank="0") == 5
    assert value(series, "grpo_rank_vote_wait_seconds_total", rank="0") == 1.5
    assert value(series, "grpo_rank_phase", rank="0", phase="generate") == 1
    assert value(series, "grpo_supervisor_up") == 1
    assert value(series, "grpo_observation_failed") == 0
    assert value(series, "grpo_observation_timestamp_seconds") == 200


def test_every_metric_of_the_catalogue_is_exported(make_slot: Any, make_status: Any) -> None:
    """A full observation leaves no metric out, under its own name."""
    status = make_status(make_slot(0))
    status.history._spans.append((1, 7, 50.0))
    assert names(scrape(collector_of(status))) == {metric.name for metric in ALL_METRICS}


def test_openmetrics_form_is_valid(make_slot: Any, make_status: Any) -> None:
    """The strict parser of the other exposition format accepts names, types and units."""
    text = generate_openmetrics(collector_of(make_status(make_slot(0), None)).registry).decode()
    families = {family.name: family for family in parse_openmetrics(text)}
    assert families["grpo_rank_vote_wait_seconds"].type == "counter"
    assert families["grpo_rank_vote_wait_seconds"].unit == "seconds"


def test_nan_and_unknown_are_left_out(make_slot: Any, make_status: Any) -> None:
    """A loss that was never set is absent, not 0 and not NaN."""
    nan = float("nan")
    status = make_status(make_slot(0, loss=nan, grad_norm=nan), make_slot(1))
    status.history.reward = None
    status.history.checkpoint = None
    series = scrape(collector_of(status))
    assert value(series, "grpo_rank_loss", rank="0") is None
    assert value(series, "grpo_rank_loss", rank="1") == 0.125
    assert "grpo_reward" not in names(series)
    assert "grpo_checkpoint_step" not in names(series)


def test_infinite_loss_is_shown(make_slot: Any, make_status: Any) -> None:
    """A loss that diverged is a fact, unlike one that was never set."""
    series = scrape(collector_of(make_status(make_slot(0, loss=float("inf")))))
    assert value(series, "grpo_rank_loss", rank="0") == float("inf")


def test_unobservable_rank_loses_its_values(make_slot: Any, make_status: Any) -> None:
    """A rank that was read before and cannot be read now keeps no old value."""
    collector = collector_of(make_status(make_slot(0), make_slot(1)), make_status(make_slot(0), None))
    assert value(scrape(collector), "grpo_rank_state", rank="1", state=RankState.training.name) == 1
    series = scrape(collector)
    assert value(series, "grpo_rank_observable", rank="1") == 0
    about_rank_1 = {name for name, labels in series if ("rank", "1") in labels}
    assert about_rank_1 == {"grpo_rank_observable"}


def test_unreadable_rank_of_a_later_node_keeps_its_global_rank(make_slot: Any, make_status: Any) -> None:
    """On the second node of four ranks each, local rank 1 is rank 5, also when no slot can be read."""
    collector = collector_of(make_status(make_slot(4, local_rank=0), None), make_status(None, None))
    assert value(scrape(collector), "grpo_rank_observable", rank="5") == 0
    series = scrape(collector)
    assert [value(series, "grpo_rank_observable", rank=rank) for rank in ("4", "5")] == [0, 0]
    assert value(series, "grpo_rank_observable", rank="0") is None


def test_ranks_do_not_vanish_with_the_board(make_slot: Any, make_status: Any) -> None:
    """When the board can no longer be read the ranks are unobservable; when the run has ended they are gone."""
    lost = make_status(state="unknown", supervisor_pid=None)
    ended = make_status(state="finished", supervisor_pid=None)
    ended.history.exit_code = 0
    collector = collector_of(make_status(make_slot(0), make_slot(1)), lost, ended)
    scrape(collector)
    series = scrape(collector)
    assert [value(series, "grpo_rank_observable", rank=rank) for rank in ("0", "1")] == [0, 0]
    assert value(series, "grpo_supervisor_up") == 0
    assert value(series, "grpo_run_state", state="unknown") == 1
    assert "grpo_rank_observable" not in names(scrape(collector))


def test_failed_reading_leaves_only_the_failure(make_slot: Any, make_status: Any) -> None:
    """No value of the last good reading survives, the scrape itself works, and it recovers."""
    collector = collector_of(make_status(make_slot(0)), OSError("gone"), make_status(make_slot(0)))
    assert value(scrape(collector), "grpo_step") == 7
    series = scrape(collector)
    assert names(series) == {
        "grpo_observation_failed",
        "grpo_observation_failures_total",
        "grpo_observation_timestamp_seconds",
    }
    assert value(series, "grpo_observation_failed") == 1
    assert value(series, "grpo_observation_failures_total") == 1
    series = scrape(collector)
    assert (value(series, "grpo_step"), value(series, "grpo_observation_failed")) == (7, 0)
    assert value(series, "grpo_observation_failures_total") == 1


def test_first_reading_that_fails_claims_no_time_and_no_run() -> None:
    """Before anything was observed there is no observation time and no run id."""
    series = scrape(collector_of(OSError("gone")))
    assert series[("grpo_observation_failed", frozenset({("run_id", "")}))] == 1
    assert "grpo_observation_timestamp_seconds" not in names(series)


def test_value_that_cannot_be_computed_is_a_failed_reading(make_slot: Any, make_status: Any) -> None:
    """A status that makes no sense does not reach the scraper as half a page."""
    status = make_status(make_slot(0))
    status.history.recoveries.append(None)
    series = scrape(collector_of(status))
    assert "grpo_step" not in names(series)
    assert value(series, "grpo_observation_failed") == 1


def test_failures_in_a_row_are_logged_once_and_their_end_too(make_status: Any) -> None:
    """A scrape every few seconds of a broken run does not flood the log."""
    collector = collector_of(OSError("gone"), OSError("gone"), make_status())
    with capture_logs() as logs:
        for _ in range(3):
            scrape(collector)
    assert [entry["event"] for entry in logs] == ["run_not_observed", "run_observed_again"]
    assert logs[1]["failures"] == 2


def test_observe_chains_the_cause() -> None:
    """Whoever asks for one reading learns why there is none."""
    collector = collector_of(OSError("gone"))
    with pytest.raises(ObservationFailed, match="OSError: gone") as failure:
        collector.observe(lambda seen: seen)
    assert isinstance(failure.value.__cause__, OSError)


def test_registering_does_not_read(make_status: Any) -> None:
    """A collector can be made before the run can be read, in a registry of the caller's."""
    script = Script(OSError("too early"))
    registry = CollectorRegistry(auto_describe=True)
    collector = RunCollector(script, registry=registry)
    assert script.reads == 0
    described: Iterator[Any] = collector.describe()
    assert not any(family.samples for family in described)
    assert registry.get_sample_value("grpo_observation_failed", {"run_id": ""}) == 1
