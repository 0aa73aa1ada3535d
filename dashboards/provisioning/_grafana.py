"""The four Grafana dashboards of a run, generated into `grafana/`.

Called by `generate.py`. Places the panels of each dashboard on the page and adds variables, annotations and
the links among the dashboards, which keep run and time range. Does not contact Grafana: the files are
provisioned by `grpo-run dashboards export`, or imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_run.dashboards.provisioning._learning import learning
from grpo_run.dashboards.provisioning._memory import memory
from grpo_run.dashboards.provisioning._overview import overview
from grpo_run.dashboards.provisioning._panels import DATASOURCE, RUN, BuiltPanel
from grpo_run.dashboards.provisioning._ranks import ranks

SCHEMA_VERSION = 39
"""Dashboard schema of Grafana 10.4 and 11.0; later versions migrate it on load."""
TAG = "grpo-run"


class Page(NamedTuple):
    """One dashboard."""

    title: str
    description: str
    panels: Callable[[], list[BuiltPanel]]


PAGES = {
    "overview": Page(
        "grpo-run: overview", "Is the run well, how far is it, where does its time go.", overview
    ),
    "ranks": Page("grpo-run: ranks and collectives", "What each rank does, and who waits for whom.", ranks),
    "memory": Page("grpo-run: memory", "Memory of GPUs by rank and phase, and of the host.", memory),
    "learning": Page(
        "grpo-run: learning and recovery", "What the model learns, and what faults cost.", learning
    ),
}
"""By the end of the dashboard's UID and of its file's name."""


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


def _variable(name: str, label: str, **fields: Any) -> dict[str, Any]:
    common = {
        "current": {}, "hide": 0, "includeAll": False, "multi": False, "options": [], "regex": "",
        "skipUrlSync": False,
    }  # fmt: skip
    return {"name": name, "label": label, **fields, **common}


def _variables() -> list[dict[str, Any]]:
    runs = "label_values(grpo_run_info,run_id)"
    query = {"qryType": 1, "query": runs, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
    return [
        _variable("datasource", "Data source", type="datasource", query="prometheus", refresh=1),
        _variable(
            "run", "Run", type="query", datasource=DATASOURCE, definition=runs, query=query, refresh=2, sort=1
        ),
    ]


def _annotation(name: str, expression: str, color: str, title: str, *, enable: bool = True) -> dict[str, Any]:
    return {
        "datasource": DATASOURCE,
        "enable": enable,
        "expr": expression.replace("{RUN", "{" + RUN),
        "iconColor": color,
        "name": name,
        "step": "60s",
        "titleFormat": title,
    }


def _annotations() -> list[dict[str, Any]]:
    builtin = {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }
    return [
        builtin,
        _annotation(
            "Incidents", "max by (cause) (increase(grpo_incidents_total{RUN}[2m])) > 0", "red", "{{cause}}"
        ),
        _annotation(
            "Restarts", "max by (cause, action) (increase(grpo_restarts_total{RUN}[2m])) > 0", "orange",
            "{{action}} after {{cause}}",
        ),
        _annotation(
            "Checkpoints", "changes(grpo_checkpoint_step{RUN}[1m]) > 0", "blue", "checkpoint", enable=False
        ),
    ]  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana's JSON model.

    Args:
        name: a key of `PAGES`.
    """
    page = PAGES[name]
    link = {
        "asDropdown": False, "icon": "external link", "includeVars": True, "keepTime": True, "tags": [TAG],
        "targetBlank": False, "title": "grpo-run", "tooltip": "", "type": "dashboards", "url": "",
    }  # fmt: skip
    return {
        "annotations": {"list": _annotations()},
        "description": f"{page.description} Generated from the metric catalogue.",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [link],
        "panels": _placed(page.panels()),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": [TAG],
        "templating": {"list": _variables()},
        "time": {"from": "now-12h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": page.title,
        "uid": f"grpo-run-{name}",
        "version": 1,
        "weekStart": "",
    }


def dashboard_text(name: str) -> str:
    """Return the text of the dashboard's file in `grafana/`."""
    return json.dumps(dashboard(name), indent=2, ensure_ascii=False) + "\n"


def queries_of(model: dict[str, Any]) -> dict[str, list[str]]:
    """Return every PromQL expression of a dashboard by where it is: the title of its panel, an annotation, or
    a variable.
    """
    found = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in model["panels"]
        if panel["type"] != "row"
    }
    found |= {
        f"annotation {item['name']}": [item["expr"]]
        for item in model["annotations"]["list"]
        if "expr" in item
    }
    return found | {"variable run": ["group by (run_id) (grpo_run_info)"]}
