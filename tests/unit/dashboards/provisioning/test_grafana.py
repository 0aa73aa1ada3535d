"""The dashboard asks only for what is exported and fits on the page."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from grpo_run.dashboards.metrics.catalogue import LABELS
from grpo_run.dashboards.metrics.labels import PHASES, RUN_STATES
from grpo_run.dashboards.provisioning.grafana import (
    PHASE_COLOURS,
    STATE_COLOURS,
    check_dashboard,
    dashboard,
    one_hot_number,
    queries_of,
)
from grpo_run.dashboards.provisioning.promql import unknown_names


@pytest.fixture
def model() -> dict[str, Any]:
    """The dashboard, made anew."""
    return dashboard()


def panel(model: dict[str, Any], title: str, kind: str) -> dict[str, Any]:
    """The one panel of that title and type."""
    (found,) = [item for item in model["panels"] if (item["title"], item["type"]) == (title, kind)]
    assert isinstance(found, dict)
    return found


def test_every_query_is_in_the_catalogue(model: dict[str, Any]) -> None:
    """All names of all queries are exported, and there are queries."""
    queries = queries_of(model)
    assert len(queries) > 20
    assert [unknown_names(query, LABELS) for query in queries] == [[]] * len(queries)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("panel", "max(grpo_stepp)"),
        ("panel", 'max(grpo_step{rank="0"})'),
        ("annotation", "max by (culprit) (grpo_incidents_total)"),
        ("variable", "label_values(grpo_run_information,run_id)"),
        ("variable", "label_values(grpo_run_info,run)"),
    ],
)
def test_a_wrong_name_is_caught(model: dict[str, Any], place: str, change: str) -> None:
    """Wherever a query stands, a name that nobody exports stops the generation."""
    if place == "panel":
        panel(model, "Goodput", "gauge")["targets"][0]["expr"] = change
    elif place == "annotation":
        model["annotations"]["list"][1]["expr"] = change
    else:
        model["templating"]["list"][1]["query"]["query"] = change
    with pytest.raises(ValueError, match="not in the catalogue"):
        check_dashboard(model)


def test_every_query_is_of_the_chosen_run_and_source(model: dict[str, Any]) -> None:
    """No panel mixes runs or asks another data source than the chosen one."""
    for item in model["panels"]:
        for target in item.get("targets", []):
            assert target["expr"].count('run_id="$run_id"') == target["expr"].count("grpo_"), item["title"]
            assert (
                target["datasource"] == item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            )
    assert [variable["name"] for variable in model["templating"]["list"]] == ["datasource", "run_id"]


def test_panels_fit_the_page_and_do_not_overlap(model: dict[str, Any]) -> None:
    """Every cell of the 24 columns holds one panel at most, rows are headings over the whole width."""
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
    assert len(cells) == 24 * (max(y for _, y in cells) + 1), "a line of panels is not filled"


def test_panels_are_told_apart_and_explained(model: dict[str, Any]) -> None:
    """Ids are unique, every panel has a description and every series a legend."""
    ids = [item["id"] for item in model["panels"]]
    assert len(set(ids)) == len(ids)
    for item in model["panels"]:
        if item["type"] != "row":
            assert item["description"], item["title"]
            assert all(target["legendFormat"] for target in item["targets"]), item["title"]
            references = [target["refId"] for target in item["targets"]]
            assert len(set(references)) == len(references)


def test_right_axes_name_series_that_exist(model: dict[str, Any]) -> None:
    """An override by name applies only to a legend of its own panel."""
    overridden = 0
    for item in model["panels"]:
        legends = {target["legendFormat"] for target in item.get("targets", [])}
        for override in item.get("fieldConfig", {}).get("overrides", []):
            assert override["matcher"]["options"] in legends, item["title"]
            overridden += 1
    assert overridden


def test_every_phase_and_state_has_its_colour() -> None:
    """The colour tables have exactly the closed sets' names, no two phases alike."""
    assert tuple(PHASE_COLOURS) == PHASES
    assert tuple(STATE_COLOURS) == RUN_STATES
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)


def test_phase_timeline_maps_every_number_it_can_give(model: dict[str, Any]) -> None:
    """Phases, none open and unobservable all have a text; an unobservable rank is not taken for an idle one."""
    timeline = panel(model, "Phase of each rank", "state-timeline")
    (mapping,) = timeline["fieldConfig"]["defaults"]["mappings"]
    texts = {value: option["text"] for value, option in mapping["options"].items()}
    expected = {str(place): name for place, name in enumerate(PHASES, start=1)}
    assert texts == expected | {"-1": "unobservable", "0": "none open"}


def test_one_hot_number_counts_from_one() -> None:
    """The n-th value of the set becomes n."""
    assert one_hot_number("grpo_m", "l", ("a", "b"), "r") == (
        'max by (r) (1 * grpo_m{run_id="$run_id",l="a"} or 2 * grpo_m{run_id="$run_id",l="b"})'
    )
