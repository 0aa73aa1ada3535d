"""The dashboards and alert rules that `grpo-run dashboards export` writes, as tests read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2]
PAGES = ("overview", "ranks", "memory", "learning")
"""By the end of the dashboard's UID and of its file's name."""
RULES_FILE = FOLDER / "dashboards" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]


def dashboard(name: str) -> dict[str, Any]:
    """Return one of `PAGES` as Grafana's JSON model."""
    model: dict[str, Any] = json.loads((FOLDER / f"dashboards/grafana/grpo-run-{name}.json").read_text())
    return model


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
