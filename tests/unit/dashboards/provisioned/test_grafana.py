"""The dashboards are valid for Grafana, query exported names only, and show every metric."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from support.metrics_page import PAGE, metrics_page
from support.promql import exported, metrics_in, parsed, unknown_names
from support.provisioned import PAGES, dashboard, queries_of

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS, PHASES, RUN_STATES

NOT_SHOWN = {
    "grpo_supervisor_up": "the state “unknown” says the same",
    "grpo_trains_without_trainer": "an alert rule uses it",
    "grpo_rank_state": "phases say more; it is for queries of users",
    "grpo_rank_reward": "the run's reward is shown",
    "grpo_rank_votes_total": "of use with the time of votes only",
    "grpo_rank_cleanup_runs_total": "the time of cleanups is shown",
    "grpo_observation_timestamp_seconds": "an alert rule uses it",
}
"""Metrics without a panel, and why."""


@pytest.fixture(params=PAGES)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each dashboard."""
    return dashboard(request.param)


def all_queries() -> list[str]:
    """Every query of every dashboard."""
    return [one for name in PAGES for found in queries_of(dashboard(name)).values() for one in found]


@pytest.mark.parametrize("query", sorted(set(all_queries())))
def test_every_query_is_valid_and_queries_exported_names(query: str) -> None:
    """promql-parser accepts the query, and each metric and label in it is exported."""
    assert unknown_names(query, exported()) == []


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ("grpo_stepp", ["grpo_stepp"]),
        ('max(grpo_step{rank="0"})', ["grpo_step{rank}"]),
        ("max by (culprit) (grpo_incidents_total)", ["culprit"]),
        ("grpo_step and on (ranks) grpo_rank_votes_total", ["ranks"]),
        ("sum(rate(grpo_rank_votes[5m])) + up", ["grpo_rank_votes", "up"]),
        ('{run_id="a"}', ["{}"]),
        ("count_over_time((grpo_wrong == 1)[1m:5s])", ["grpo_wrong"]),
    ],
)
def test_the_check_finds_names_that_are_not_exported(query: str, unknown: list[str]) -> None:
    """A misspelled metric or label is found wherever it stands."""
    assert unknown_names(query, exported()) == unknown


def test_the_check_rejects_what_is_not_promql() -> None:
    """Grafana would show such a panel with an error."""
    with pytest.raises(ValueError, match="parenthesis"):
        parsed("max by (rank (grpo_step)")


def test_every_metric_is_shown_or_has_a_reason() -> None:
    """No metric is exported that nobody can see, and no reason is stale."""
    shown = {name for query in all_queries() for name in metrics_in(query)}
    assert {metric.name for metric in ALL_METRICS} - shown == set(NOT_SHOWN)


def test_grafanas_own_model_accepts_it(model: dict[str, Any]) -> None:
    """Grafana's foundation SDK reads the dashboard and writes the same panels, queries and links."""
    register_default_plugins()
    read = Dashboard.from_json(model)
    assert read.uid == model["uid"]
    assert [panel.title for panel in read.panels or []] == [panel["title"] for panel in model["panels"]]
    again = [[one.expr for one in getattr(panel, "targets", None) or []] for panel in read.panels or []]
    assert again == [[one["expr"] for one in panel.get("targets", [])] for panel in model["panels"]]
    assert (read.links or [])[0].include_vars
    assert (read.links or [])[0].keep_time


def test_every_query_uses_the_selected_run_and_data_source(model: dict[str, Any]) -> None:
    """No panel mixes runs, and all use the selected data source."""
    assert [variable["name"] for variable in model["templating"]["list"]] == ["datasource", "run"]
    source = {"type": "prometheus", "uid": "${datasource}"}
    for item in model["panels"]:
        for target in item.get("targets", []):
            assert target["expr"].count('{run_id="$run"') == target["expr"].count("grpo_"), item["title"]
            assert target["datasource"] == item["datasource"] == source


def test_rates_follow_the_scrape_interval(model: dict[str, Any]) -> None:
    """A fixed range would be empty with rare scrapes."""
    for item in model["panels"]:
        for target in item.get("targets", []):
            assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= {"$__rate_interval"}, item["title"]


def test_panels_fit_the_page_and_do_not_overlap(model: dict[str, Any]) -> None:
    """Each grid cell holds exactly one panel, and row headings have the full width."""
    cells: Counter[tuple[int, int]] = Counter()
    for item in model["panels"]:
        grid = item["gridPos"]
        assert grid["x"] >= 0
        assert grid["w"] > 0
        assert grid["x"] + grid["w"] <= 24
        if item["type"] == "row":
            assert (grid["x"], grid["w"], grid["h"]) == (0, 24, 1)
        cells.update(
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        )
    assert max(cells.values()) == 1
    assert len(cells) == 24 * (max(y for _, y in cells) + 1), "a line of panels has a gap"


def test_panels_have_unique_titles_descriptions_and_units(model: dict[str, Any]) -> None:
    """Every panel says what it shows, and every series has a legend."""
    panels = [item for item in model["panels"] if item["type"] != "row"]
    assert len({item["id"] for item in model["panels"]}) == len(model["panels"])
    assert len({item["title"] for item in panels}) == len(panels)
    for item in panels:
        assert item["description"].endswith("."), item["title"]
        assert item["fieldConfig"]["defaults"]["unit"], item["title"]
        assert all(target["legendFormat"] for target in item["targets"]), item["title"]
        references = [target["refId"] for target in item["targets"]]
        assert len(set(references)) == len(references)


def test_overrides_name_series_that_exist(model: dict[str, Any]) -> None:
    """An override of an axis refers to a legend of its own panel, one of a color to a value of its label."""
    known = {*PHASES, *RUN_STATES}
    for item in model["panels"]:
        legends = {target["legendFormat"] for target in item.get("targets", [])}
        for override in item.get("fieldConfig", {}).get("overrides", []):
            colored = override["properties"][0]["id"] == "color"
            named = override["matcher"]["options"]
            assert named in legends or (colored and ("{{state}}" in legends or named in known)), item["title"]


def test_every_phase_has_its_own_color_wherever_phases_are_series() -> None:
    """No two phases share a color, and a phase has the same one on every panel."""
    colored = [
        {
            override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
            for override in item["fieldConfig"]["overrides"]
        }
        for name in PAGES
        for item in dashboard(name)["panels"]
        if any("{{phase}}" in target["legendFormat"] for target in item.get("targets", []))
        and item["fieldConfig"]["overrides"]
    ]
    assert len(colored) > 1
    for colors in colored:
        assert tuple(colors) == PHASES
        assert colors == colored[0]
        assert len(set(colors.values())) == len(PHASES)


def test_the_state_of_a_run_has_a_text_for_every_state() -> None:
    """States are numbered from one, in their order."""
    (state,) = [item for item in dashboard("overview")["panels"] if item["title"] == "State"]
    (mapping,) = state["fieldConfig"]["defaults"]["mappings"]
    texts = {value: option["text"] for value, option in mapping["options"].items()}
    assert texts == {str(place): name for place, name in enumerate(RUN_STATES, start=1)}
    for place, name in enumerate(RUN_STATES, start=1):
        assert f'{place} * grpo_run_state{{run_id="$run",state="{name}"}}' in state["targets"][0]["expr"]


def test_phase_timeline_maps_every_possible_value() -> None:
    """Every phase, no phase and an unobservable rank have their own text."""
    (timeline,) = [item for item in dashboard("ranks")["panels"] if item["type"] == "state-timeline"]
    (mapping,) = timeline["fieldConfig"]["defaults"]["mappings"]
    texts = {value: option["text"] for value, option in mapping["options"].items()}
    expected = {str(place): name for place, name in enumerate(PHASES, start=1)}
    assert texts == expected | {"-1": "unobservable", "0": "no phase"}


def test_the_page_of_metrics_is_up_to_date() -> None:
    """It names the panels of each metric; `make generated` writes it."""
    assert PAGE.read_text(encoding="utf-8") == metrics_page()
