"""What Grafana and Prometheus are given: the dashboards and alert rules of the core with those of features.

The core's are the files of `grafana/` and `prometheus/`, as Grafana and Prometheus read them. A feature adds
`panels.json`, which has its panels by dashboard and by the title of the row that they are appended to, and
`alerts.yml`, which has its rules. Called by `cli/dashboards.py`. Writes no file.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import yaml

from grpo_run.runtime.features import FEATURES

RUNBOOK = "http://127.0.0.1:9480/runbook"
"""Where `grpo-run serve` has the runbook unless it is told another address."""
COLUMNS = 24
"""Of a Grafana dashboard."""


def dashboards() -> dict[str, dict[str, Any]]:
    """Return Grafana's model of each dashboard, by the name of its file without the ending."""
    found = {
        file.name.removesuffix(".json"): json.loads(file.read_text())
        for file in files("grpo_run.dashboards.grafana").iterdir()
        if file.name.endswith(".json")
    }
    for text in _of_features("panels.json"):
        for dashboard, rows in json.loads(text).items():
            for row, panels in rows.items():
                _append(found[dashboard]["panels"], row, panels)
    return found


def alert_rules(runbook: str = RUNBOOK) -> dict[str, Any]:
    """Return Prometheus' rule file: one group with all rules.

    Args:
        runbook: address of the page that `dashboards/runbook.py` makes, of which each rule gets its section.
    """
    rules: dict[str, Any] = yaml.safe_load(
        files("grpo_run.dashboards.prometheus").joinpath("alerts.yml").read_text()
    )
    for text in _of_features("alerts.yml"):
        rules["groups"][0]["rules"] += yaml.safe_load(text)
    for rule in rules["groups"][0]["rules"]:
        rule.setdefault("annotations", {})["runbook_url"] = f"{runbook}#{rule['alert'].lower()}"
    return rules


def _of_features(name: str) -> list[str]:
    """Return the texts of one file of the features that have it."""
    found = (files(feature).joinpath(name) for feature in FEATURES)
    return [file.read_text() for file in found if file.is_file()]


def _append(panels: list[dict[str, Any]], row: str, added: list[dict[str, Any]]) -> None:
    """Add panels below the last one of a row, from left to right; what follows moves down.

    Args:
        panels: of a dashboard, in their order.
        added: with the width and height of each in `gridPos`.
    """
    titles = [panel["title"] if panel["type"] == "row" else None for panel in panels]
    after = next(
        (index for index in range(titles.index(row) + 1, len(panels)) if titles[index] is not None),
        len(panels),
    )
    start = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels[:after])
    x, top, bottom = 0, start, start
    for panel in added:
        place = panel["gridPos"]
        if x + place["w"] > COLUMNS:
            x, top = 0, bottom
        panel["gridPos"] = {**place, "x": x, "y": top}
        x, bottom = x + place["w"], max(bottom, top + place["h"])
    for panel in panels[after:]:
        panel["gridPos"]["y"] += bottom - start
    panels[after:after] = added
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
