"""The Grafana dashboard of one run, generated into `grafana/grpo-run.json`.

Called by `generate.py`. Places the panels of `_rows.py` on the page and adds variables and annotations. Every
query is checked against the metric catalogue before the file is written. Does not contact Grafana: the file
is imported or provisioned by the user.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grpo_run.dashboards.metrics.catalogue import LABELS
from grpo_run.dashboards.provisioning._panels import DATASOURCE, BuiltPanel
from grpo_run.dashboards.provisioning._promql import unknown_names
from grpo_run.dashboards.provisioning._rows import RUN, all_rows

UID = "grpo-run"
SCHEMA_VERSION = 39
"""Dashboard schema of Grafana 10.4 and 11.0; later versions migrate it on load."""

_LABEL_VALUES = re.compile(r"label_values\((\w+),(\w+)\)")


def queries_of(dashboard: dict[str, Any]) -> list[str]:
    """Return every PromQL expression of a dashboard: of panels, annotations and variables."""
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    annotations = [item["expr"] for item in dashboard["annotations"]["list"] if "expr" in item]
    variables = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert match is not None, "variables must have the form label_values(metric,label)"
            metric, label = match.groups()
            variables.append(f"group by ({label}) ({metric})")
    return panels + annotations + variables


def check_dashboard(dashboard: dict[str, Any]) -> None:
    """Check every metric and label name in every query against the catalogue.

    Raises:
        ValueError: a query uses a metric or a label that is not exported.
    """
    for query in queries_of(dashboard):
        unknown = unknown_names(query, LABELS)
        if unknown:
            raise ValueError(f"query {query!r} uses {', '.join(unknown)}, which the catalogue does not have")


def _placed(panels: list[BuiltPanel]) -> list[dict[str, Any]]:
    """Assign IDs and positions: left to right on Grafana's 24 columns, with line breaks."""
    placed, x, y, line_height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > 24:
            x, y, line_height = 0, y + line_height, 0
        grid = {"h": panel.height, "w": panel.width, "x": x, "y": y}
        placed.append({"id": number, "gridPos": grid, **panel.body})
        x, line_height = x + panel.width, max(line_height, panel.height)
    return placed


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 1,
            "regex": "",
            "skipUrlSync": False,
        },
        {
            "name": "run_id",
            "label": "Run",
            "type": "query",
            "datasource": DATASOURCE,
            "definition": "label_values(grpo_run_info,run_id)",
            "query": {
                "qryType": 1,
                "query": "label_values(grpo_run_info,run_id)",
                "refId": "PrometheusVariableQueryEditor-VariableQuery",
            },
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 2,
            "regex": "",
            "skipUrlSync": False,
            "sort": 1,
        },
    ]


def _annotations() -> list[dict[str, Any]]:
    return [
        {
            "builtIn": 1,
            "datasource": {"type": "grafana", "uid": "-- Grafana --"},
            "enable": True,
            "hide": True,
            "iconColor": "rgba(0, 211, 255, 1)",
            "name": "Annotations & Alerts",
            "type": "dashboard",
        },
        {
            "datasource": DATASOURCE,
            "enable": True,
            "expr": f"max by (cause) (increase(grpo_incidents_total{{{RUN}}}[2m])) > 0",
            "iconColor": "red",
            "name": "Incidents",
            "step": "60s",
            "titleFormat": "{{cause}}",
        },
    ]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON model.

    Raises:
        ValueError: a query uses a metric or a label that is not exported.
    """
    model: dict[str, Any] = {
        "annotations": {"list": _annotations()},
        "description": "One grpo-run training run. Generated from the metric catalogue.",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": _placed(all_rows()),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["grpo-run", "training"],
        "templating": {"list": _variables()},
        "time": {"from": "now-12h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "grpo-run",
        "uid": UID,
        "version": 1,
        "weekStart": "",
    }
    check_dashboard(model)
    return model


def dashboard_text() -> str:
    """Return the text of `grafana/grpo-run.json`."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
