"""Curves follow a journal, forget what a restart has undone, and stay small."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.journal import as_event

from grpo_run.dashboards.curves import CHARTS, LINES, MOST_LINES, MOST_POINTS, Curve, RunCurves, charts_of
from grpo_run.dashboards.metrics.catalogue import RUN_METRICS
from grpo_run.runtime.history.history import History
from grpo_run.runtime.launching.reading import history_parts
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS


def follow(curves: RunCurves, event: str, **fields: Any) -> None:
    """Let the curves take one record."""
    curves.apply(as_event({"event": event, "time": 1.0, **fields}), History())


def logged(curves: RunCurves, *steps: int, call: int = 1, reward: float = 0.5) -> None:
    """Log a reward at some steps."""
    for step in steps:
        follow(curves, "step_logged", step=step, train_call=call, reward=reward)


def steps_of(curves: RunCurves) -> list[int]:
    """The steps that the curve of the reward has."""
    return [point[0] for point in curves.points().get("reward", [])]


def test_steps_that_a_restart_undoes_are_removed_and_come_again() -> None:
    """The call resumes from step 3, and logs step 4 with another value."""
    curves = RunCurves()
    logged(curves, 1, 2, 3, 4, 5)
    follow(curves, "train_started", rank=0, train_call=1, step=3)
    assert steps_of(curves) == [1, 2, 3]
    logged(curves, 4, reward=0.75)
    assert curves.points()["reward"][-1] == (4, 0.75, 0.75, 0.75)


def test_a_step_that_is_logged_again_replaces_what_follows_it() -> None:
    """Also without a restart that says so."""
    curves = RunCurves()
    logged(curves, 1, 2, 3)
    logged(curves, 2)
    assert steps_of(curves) == [1, 2]


def test_the_start_of_another_rank_removes_no_steps() -> None:
    """Every rank logs its start, but only rank 0 logs steps."""
    curves = RunCurves()
    logged(curves, 1, 2, 3)
    follow(curves, "train_started", rank=1, train_call=1, step=0)
    assert steps_of(curves) == [1, 2, 3]


def test_another_call_begins_curves_of_its_own() -> None:
    """A warm start logs losses; its steps are not those of the GRPO call."""
    curves = RunCurves()
    follow(curves, "step_logged", step=9, train_call=1, loss=2.0)
    logged(curves, 1, call=2)
    assert (curves.train_call, sorted(curves.points())) == (2, ["reward"])


def test_checkpoints_are_listed_until_they_are_removed() -> None:
    """The newest comes last; one that is published again is listed once."""
    curves = RunCurves()
    for step, removed in ((5, []), (10, []), (10, []), (15, ["c-5"])):
        follow(curves, "checkpoint_published", step=step, path=f"c-{step}", removed=removed, verified=True)
    assert [(one["step"], one["verified"]) for one in curves.checkpoints] == [(10, True), (15, True)]


def test_records_with_other_fields_are_left_out() -> None:
    """Of another version, or truncated to their header."""
    curves = RunCurves()
    for fields in ({}, {"step": "x", "reward": 1.0}, {"step": 1, "train_call": 1, "reward": None}):
        follow(curves, "step_logged", **fields)
    follow(curves, "checkpoint_published", step=1)
    follow(curves, "train_started", rank=0)
    assert (curves.points(), curves.checkpoints) == ({}, [])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 10**9))
def test_a_long_curve_keeps_its_extremes_in_few_points(values: list[float], first: int) -> None:
    """And its last step."""
    curve = Curve()
    for step, value in enumerate(values, first):
        curve.add(step, value)
    points = curve.points()
    assert len(points) <= MOST_POINTS + 1
    assert points[-1][0] == first + len(values) - 1
    assert (min(point[2] for point in points), max(point[3] for point in points)) == (
        min(values),
        max(values),
    )
    assert all(low - 1e-6 <= mean <= high + 1e-6 for _, mean, low, high in points)


def test_points_of_the_past_stay_while_a_curve_grows() -> None:
    """So that a page is sent the new points only; the groups double rarely."""
    curve, changed = Curve(), 0
    before: list[Any] = []
    for step in range(1, 5001):
        curve.add(step, math.sin(step))
        points = curve.points()
        changed += points[: len(before) - 1] != before[:-1]
        before = points
    assert changed == 4


def test_every_logged_metric_is_drawn() -> None:
    """A row that is added to the table of metrics needs a chart."""
    keys = {chart.key for chart in CHARTS}
    assert {LINES.get(name, name).partition("/")[0] for name in LOGGED_FIELDS} <= keys


def test_the_clipped_shares_share_a_chart() -> None:
    """All, and those by side that were logged."""
    curves = RunCurves()
    clipped = {"low_mean": 0.25, "high_max": 0.5}
    follow(curves, "step_logged", step=1, train_call=1, clip_ratio=0.5, clipped=clipped)
    assert set(curves.points()) == {"clip_ratio", "clip_ratio/low mean", "clip_ratio/high max"}


def test_each_reward_function_has_its_mean_and_its_spread() -> None:
    """Under its name, also if it has a stroke, without what would break a page."""
    curves = RunCurves()
    functions = {"a/b": {"mean": 0.25, "std": 0.5}, "\x1b[2J": {"mean": 1.0}}
    follow(curves, "step_logged", step=1, train_call=1, reward=0.5, reward_functions=functions)
    assert {key: points[0][1] for key, points in curves.points().items()} == {
        "reward": 0.5, "reward_function/a/b": 0.25, "reward_std/a/b": 0.5, "reward_function/␛[2J": 1.0,
    }  # fmt: skip


def test_a_script_cannot_make_lines_without_end() -> None:
    """A reward function may have another name in every step."""
    curves = RunCurves()
    for step in range(2 * MOST_LINES):
        functions = {f"f{step}": {"mean": 1.0}}
        follow(curves, "step_logged", step=step, train_call=1, reward=0.5, reward_functions=functions)
    assert len(curves.points()) == MOST_LINES
    assert steps_of(curves)[-1] == 2 * MOST_LINES - 1


def test_the_pace_of_steps_is_that_between_commits_of_one_attempt() -> None:
    """Steps that were committed or seen together share their time; a restart and a new count begin anew."""
    curves = RunCurves()
    for attempt, step, at, tokens in (
        (0, 1, 10.0, 100),
        (0, 3, 14.0, 500),
        (1, 2, 50.0, 80),
        (1, 3, 51.0, 90),
        (1, 4, 51.0, 95),
        (1, 5, 53.0, 110),
    ):
        follow(curves, "step_committed", train_call=1, attempt=attempt, step=step, committed_at=at,
               tokens=tokens, completions=tokens // 10)  # fmt: skip
    drawn = {key: [(step, mean) for step, mean, _, _ in points] for key, points in curves.points().items()}
    assert drawn["step_seconds"] == [(3, 1.0), (5, 1.0)]
    assert drawn["tokens_per_second"] == [(3, 10.0), (5, 10.0)]
    assert drawn["completions_per_second"] == [(3, 1.0), (5, 1.0)]


def test_what_features_draw_is_added_up_over_ranks() -> None:
    """At the step of the event, in whichever order the ranks write."""
    history = History(parts=tuple(history_parts()))
    curves = RunCurves()
    logged(curves, 1)
    for rank, step in ((0, 2), (0, 3), (1, 2)):
        record = {"event": "sample_masked", "rank": rank, "step": step, "reason": "nan", "count": 2}
        curves.apply(as_event(record, history.decoder), history)
    assert [(step, mean) for step, mean, _, _ in curves.points()["masked/nan"]] == [(2, 4.0), (3, 2.0)]
    assert "masked" in {chart.key for chart in charts_of(history)}


def test_keys_of_charts_are_unique_and_their_metrics_exist() -> None:
    """Those of features too; a chart that is sampled has one metric."""
    charts = charts_of(History(parts=tuple(history_parts())))
    names = {metric.name for metric in RUN_METRICS}
    assert len({chart.key for chart in charts}) == len(charts)
    for chart in charts:
        assert set(chart.metrics or (f"grpo_rank_{chart.key}",)) <= names, chart
        assert not chart.sampled or len(chart.metrics) == 1
