"""The collector exports what it observed, and reports a failed observation."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from grpo_run.dashboards.metrics._collector import RunCollector
from grpo_run.dashboards.metrics.catalogue import ALL_METRICS
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import RankState

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Script:
    """A `read` callable that returns or raises the given results in order and repeats the last one."""

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
    """A collector over scripted results, with clocks fixed at 1000 s and 200 s."""
    return RunCollector(Script(*results), monotonic=lambda: 1000.0, wall=lambda: 200.0)


def scrape(collector: RunCollector) -> Series:
    """Scrape once; the samples go through the text format and its parser."""
    families = text_string_to_metric_families(collector.page())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float | None:
    """The value of one series of the run `night`, or None if it is not exported."""
    return series.get((name, frozenset({"run_id": "night", **labels}.items())))


def names(series: Series) -> set[str]:
    """Names of the metrics in a scrape."""
    return {name for name, _ in series}


def test_every_metric_of_the_catalogue_is_exported(make_slot: Any, make_status: Any) -> None:
    """A full observation exports every metric under its own name."""
    status = make_status(make_slot(0))
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    expected = {metric.name + part for metric in ALL_METRICS for part in parts.get(metric.kind, ("",))}
    assert names(scrape(collector_of(status))) == expected


def test_nan_and_unknown_values_are_not_exported(make_slot: Any, make_status: Any) -> None:
    """A loss that was never set is absent, neither 0 nor NaN; one that has diverged is a value."""
    nan, diverged = float("nan"), float("inf")
    status = make_status(make_slot(0, loss=nan, grad_norm=nan), make_slot(1), make_slot(2, loss=diverged))
    status.history.reward = None
    status.history.checkpoint = None
    series = scrape(collector_of(status))
    assert value(series, "grpo_rank_loss", rank="0") is None
    assert value(series, "grpo_rank_loss", rank="1") == 0.125
    assert value(series, "grpo_rank_loss", rank="2") == diverged
    assert "grpo_reward" not in names(series)
    assert "grpo_checkpoint_step" not in names(series)


def test_a_rank_that_becomes_unreadable_loses_its_values(make_slot: Any, make_status: Any) -> None:
    """No value of an earlier read is exported for a rank that can no longer be read."""
    collector = collector_of(make_status(make_slot(0), make_slot(1)), make_status(make_slot(0), None))
    assert value(scrape(collector), "grpo_rank_state", rank="1", state=RankState.training.name) == 1
    series = scrape(collector)
    assert value(series, "grpo_rank_observable", rank="1") == 0
    about_rank_1 = {name for name, labels in series if ("rank", "1") in labels}
    assert about_rank_1 == {"grpo_rank_observable"}


def test_unreadable_rank_of_a_later_node_keeps_its_global_rank(make_slot: Any, make_status: Any) -> None:
    """Local rank 1 of the second node is rank 5, even if no slot can be read."""
    collector = collector_of(make_status(make_slot(4, local_rank=0), None), make_status(None, None))
    assert value(scrape(collector), "grpo_rank_observable", rank="5") == 0
    series = scrape(collector)
    assert [value(series, "grpo_rank_observable", rank=rank) for rank in ("4", "5")] == [0, 0]
    assert value(series, "grpo_rank_observable", rank="0") is None


def test_ranks_stay_exported_if_the_board_becomes_unreadable(make_slot: Any, make_status: Any) -> None:
    """If the board becomes unreadable the ranks are unobservable; after the run has ended they are absent."""
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


def test_failed_read_exports_only_the_failure(make_slot: Any, make_status: Any) -> None:
    """A failed read keeps no old value, does not fail the scrape, and the next read recovers."""
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


def test_value_that_cannot_be_computed_is_a_failed_read(make_slot: Any, make_status: Any) -> None:
    """An invalid status gives a failed observation instead of a partial page."""
    status = make_status(make_slot(0))
    status.history.recoveries.append(None)
    with capture_logs():  # drawing a traceback takes most of a second
        series = scrape(collector_of(status))
    assert "grpo_step" not in names(series)
    assert value(series, "grpo_observation_failed") == 1


def test_consecutive_failures_are_logged_once(make_status: Any) -> None:
    """The first of consecutive failures and the recovery are logged, the failures between are not."""
    collector = collector_of(OSError("gone"), OSError("gone"), make_status())
    with capture_logs() as logs:
        for _ in range(3):
            scrape(collector)
    assert [entry["event"] for entry in logs] == ["run_not_observed", "run_observed_again"]
    assert logs[1]["failures"] == 2


def test_a_collector_can_be_made_before_the_run_is_readable() -> None:
    """It reads the run at a scrape; before the first successful one it has neither its name nor a time."""
    script = Script(OSError("too early"))
    collector = RunCollector(script)
    assert script.reads == 0
    series = scrape(collector)
    assert series[("grpo_observation_failed", frozenset({("run_id", "")}))] == 1
    assert "grpo_observation_timestamp_seconds" not in names(series)


def test_names_with_quotes_and_values_without_an_end_are_read_back(make_slot: Any, make_status: Any) -> None:
    """Names of reward functions and runs are the user's, and a loss may diverge in both directions."""
    name = 'a "quoted" \\ name\nof two lines'
    status = make_status(make_slot(0, loss=float("inf")), make_slot(1, loss=float("-inf")), run_id=name)
    status.history.rewards.logged[name] = {"mean": 1e300, "std": 1e-300}
    series = scrape(collector_of(status))

    def value_of(metric: str, **labels: str) -> float:
        return series[metric, frozenset({"run_id": name, **labels}.items())]

    assert value_of("grpo_reward_function_mean", function=name) == 1e300
    assert value_of("grpo_reward_function_std", function=name) == 1e-300
    assert value_of("grpo_rank_loss", rank="0") == float("inf")
    assert value_of("grpo_rank_loss", rank="1") == float("-inf")


def test_a_second_scrape_has_the_new_values_and_the_new_run(make_slot: Any, make_status: Any) -> None:
    """What is kept between scrapes are names, never values."""
    first, second = make_status(make_slot(0)), make_status(make_slot(0), run_id="day")
    second.history.step = 9
    collector = collector_of(first, second)
    assert value(scrape(collector), "grpo_step") == 7
    assert scrape(collector)[("grpo_step", frozenset({("run_id", "day")}))] == 9
