"""The dashboard queries exported names only, and its panels fit on the page."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from grpo_run.dashboards.metrics.catalogue import LABELS
from grpo_run.dashboards.metrics.metric import PHASES, RUN_STATES
from grpo_run.dashboards.provisioning._grafana import check_dashboard, dashboard, queries_of
from grpo_run.dashboards.provisioning._promql import unknown_names
from grpo_run.dashboards.provisioning._rows import PHASE_COLORS, STATE_COLORS, one_hot_number


@pytest.fixture
def model() -> dict[str, Any]:
    """A new dashboard."""
    return dashboard()


def panel(model: dict[str, Any], title: str, kind: str) -> dict[str, Any]:
    """The only panel with this title and type."""
    (found,) = [item for item in model["panels"] if (item["title"], item["type"]) == (title, kind)]
    assert isinstance(found, dict)
    return found


def test_every_query_is_in_the_catalogue(model: dict[str, Any]) -> None:
    """All names in all queries are exported, and there are more than 20 queries."""
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
def test_an_unknown_name_is_rejected(model: dict[str, Any], place: str, change: str) -> None:
    """An unknown name in a panel, annotation or variable is an error."""
    if place == "panel":
        panel(model, "Goodput", "gauge")["targets"][0]["expr"] = change
    elif place == "annotation":
        model["annotations"]["list"][1]["expr"] = change
    else:
        model["templating"]["list"][1]["query"]["query"] = change
    with pytest.raises(ValueError, match="which the catalogue does not have"):
        check_dashboard(model)


def test_every_query_uses_the_selected_run_and_data_source(model: dict[str, Any]) -> None:
    """No panel mixes runs, and all use the selected data source."""
    for item in model["panels"]:
        for target in item.get("targets", []):
            assert target["expr"].count('run_id="$run_id"') == target["expr"].count("grpo_"), item["title"]
            assert (
                target["datasource"] == item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            )
    assert [variable["name"] for variable in model["templating"]["list"]] == ["datasource", "run_id"]


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


def test_panels_have_unique_ids_and_descriptions(model: dict[str, Any]) -> None:
    """IDs are unique, every panel has a description, and every series has a legend."""
    ids = [item["id"] for item in model["panels"]]
    assert len(set(ids)) == len(ids)
    for item in model["panels"]:
        if item["type"] != "row":
            assert item["description"], item["title"]
            assert all(target["legendFormat"] for target in item["targets"]), item["title"]
            references = [target["refId"] for target in item["targets"]]
            assert len(set(references)) == len(references)


def test_right_axes_name_series_that_exist(model: dict[str, Any]) -> None:
    """Every override refers to a legend of its own panel."""
    overridden = 0
    for item in model["panels"]:
        legends = {target["legendFormat"] for target in item.get("targets", [])}
        for override in item.get("fieldConfig", {}).get("overrides", []):
            assert override["matcher"]["options"] in legends, item["title"]
            overridden += 1
    assert overridden


def test_every_phase_and_state_has_a_color() -> None:
    """The color tables match the closed sets, and no two phases share a color."""
    assert tuple(PHASE_COLORS) == PHASES
    assert tuple(STATE_COLORS) == RUN_STATES
    assert len(set(PHASE_COLORS.values())) == len(PHASES)


def test_phase_timeline_maps_every_possible_value(model: dict[str, Any]) -> None:
    """Every phase, no phase and an unobservable rank have their own text."""
    timeline = panel(model, "Phase by rank", "state-timeline")
    (mapping,) = timeline["fieldConfig"]["defaults"]["mappings"]
    texts = {value: option["text"] for value, option in mapping["options"].items()}
    expected = {str(place): name for place, name in enumerate(PHASES, start=1)}
    assert texts == expected | {"-1": "unobservable", "0": "no phase"}


def test_one_hot_number_counts_from_one() -> None:
    """The n-th value of the set is mapped to n."""
    assert one_hot_number("grpo_m", "l", ("a", "b"), "r") == (
        'max by (r) (1 * grpo_m{run_id="$run_id",l="a"} or 2 * grpo_m{run_id="$run_id",l="b"})'
    )
