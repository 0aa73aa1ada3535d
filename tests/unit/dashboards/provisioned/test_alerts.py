"""The alert rules use exported names only, and each rule has tests."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from support.alerts_page import PAGE, alerts_page
from support.promql import exported, unknown_names
from support.provisioned import FOLDER, RULES

from grpo_run.dashboards.metrics.catalogue import CAUSES
from grpo_run.dashboards.provisioning import RUNBOOK
from grpo_run.watchdog.causes import Cause


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_rule_is_valid_and_uses_exported_names(rule: dict[str, Any]) -> None:
    """A misspelled name would give a rule that never fires. Prometheus adds `instance` to all series."""
    labels = {name: known | {"instance"} for name, known in exported().items()}
    assert unknown_names(rule["expr"], labels) == []


def test_every_rule_has_severity_summary_and_description() -> None:
    """Alertmanager shows them, and routes by the severity."""
    for rule in RULES:
        assert rule["alert"].startswith("GrpoRun")
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_every_cause_belongs_to_one_alert() -> None:
    """A fault that fires two alerts is counted twice by whoever reads them; one without is missed. A stop was
    asked for.
    """
    for cause in (one for one in CAUSES if one != Cause.stopped):
        claimed = [
            rule["alert"]
            for rule in RULES
            for causes in re.findall(r'grpo_incidents_total{cause=~"([^"]+)"', rule["expr"])
            if cause in causes.split("|")
        ]
        assert len(claimed) == 1, (cause, claimed)


def test_the_page_of_alerts_is_up_to_date() -> None:
    """A reader who is woken up finds the section of the alert; `make generated` writes it."""
    assert PAGE.read_text(encoding="utf-8") == alerts_page()
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"


def test_every_rule_has_a_firing_and_a_silent_case() -> None:
    """The promtool tests have both cases for every alert, and no unknown alert."""
    tests = yaml.safe_load((FOLDER / "tests" / "integration" / "alerts_test.yml").read_text())["tests"]
    cases: list[dict[str, Any]] = [case for test in tests for case in test["alert_rule_test"]]
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert firing == silent == {rule["alert"] for rule in RULES}
