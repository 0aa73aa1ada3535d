"""The dashboards and alert rules that `grpo-run dashboards export` writes, as tests read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grpo_run.dashboards.provisioning import alert_rules, dashboards

FOLDER = Path(__file__).resolve().parents[2]
PAGES = ("overview", "ranks", "memory", "learning")
"""By the end of the dashboard's UID and of its file's name."""
RULES: list[dict[str, Any]] = alert_rules()["groups"][0]["rules"]


def rules_file(folder: Path) -> Path:
    """Write the rules into a folder, as `grpo-run dashboards export` does; return the file."""
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump(alert_rules(), sort_keys=False))
    return path


def dashboard(name: str) -> dict[str, Any]:
    """Return one of `PAGES` as Grafana's JSON model."""
    return dashboards()[f"grpo-run-{name}"]


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
