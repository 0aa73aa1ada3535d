"""promtool accepts the alert rules, and their unit tests notice a rule that never fires."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml
from support.prometheus import DEADLINE_SECONDS, RULES, promtool, tool


def test_promtool_accepts_the_rules() -> None:
    """promtool accepts the committed rules."""
    assert "11 rules found" in promtool("check", "rules", str(RULES))


def test_every_alert_passes_its_unit_tests() -> None:
    """The tests in alerts_test.yml pass."""
    assert "SUCCESS" in promtool("test", "rules", str(RULES.with_name("alerts_test.yml")))


def test_the_alerts_unit_tests_detect_rules_that_never_fire(tmp_path: Path) -> None:
    """A rule that no longer fires fails its tests."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = f"({rule['expr']}) and vector(1) == 2"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    shutil.copy(RULES.with_name("alerts_test.yml"), tmp_path)
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(tmp_path / "alerts_test.yml")],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    for rule in rules["groups"][0]["rules"]:
        assert f"alertname: {rule['alert']}" in done.stdout + done.stderr
