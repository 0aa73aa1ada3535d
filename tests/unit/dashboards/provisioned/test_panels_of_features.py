"""A feature's panels are appended to a row of a dashboard, and its alert rules to the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from grpo_run.dashboards import provisioning


@pytest.fixture
def feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A feature without files, as the only one."""
    folder = tmp_path / "planted_feature"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    __import__("planted_feature")
    monkeypatch.setattr(provisioning, "FEATURES", (sys.modules.pop("planted_feature"),))
    return folder


def test_panels_follow_the_last_of_their_row_and_move_the_others_down(feature: Path) -> None:
    """From left to right, in lines as high as their highest panel."""
    before = provisioning.dashboards()["grpo-run-learning"]["panels"]
    sizes = [(12, 8), (12, 6), (24, 5)]
    panels = [
        {"type": "stat", "title": f"new {width}x{height}", "gridPos": {"w": width, "h": height}}
        for width, height in sizes
    ]
    (feature / "panels.json").write_text(json.dumps({"grpo-run-learning": {"Optimization": panels}}))
    after = provisioning.dashboards()["grpo-run-learning"]["panels"]
    titles = [panel["title"] for panel in after]
    row = titles.index("Rollouts")
    assert titles[row - 3 : row] == ["new 12x8", "new 12x6", "new 24x5"]
    old = {panel["title"]: panel["gridPos"]["y"] for panel in before}
    now = {panel["title"]: panel["gridPos"]["y"] for panel in after}
    moved = {title: now[title] - y for title, y in old.items()}
    assert {title: 13 if titles.index(title) >= row else 0 for title in moved} == moved
    assert [panel["id"] for panel in after] == list(range(1, len(after) + 1))


def test_alert_rules_join_the_group(feature: Path) -> None:
    """Prometheus evaluates them with the core's, and each gets its link."""
    core = provisioning.alert_rules()["groups"][0]["rules"]
    (feature / "alerts.yml").write_text("- alert: Planted\n  expr: vector(1)\n")
    assert provisioning.alert_rules()["groups"][0]["rules"] == [
        *core,
        {
            "alert": "Planted", "expr": "vector(1)",
            "annotations": {"runbook_url": f"{provisioning.RUNBOOK}#planted"},
        },
    ]  # fmt: skip
