"""promtool accepts the alert rules, and their unit tests notice a rule that never fires."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml
from support.prometheus import DEADLINE_SECONDS, promtool, tool
from support.provisioned import RULES, rules_file

TESTS = Path(__file__).with_name("alerts_test.yml")


def checked_with(folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the unit tests on the rules without annotations.

    Args:
        folder: for both files.
        changes: fields of every rule to replace; `{}` stands for the old value.
    """
    groups = yaml.safe_load(rules_file(folder).read_text())
    for rule in groups["groups"][0]["rules"]:
        del rule["annotations"]
        rule.update({name: new.format(rule[name]) for name, new in changes.items()})
    (folder / "alerts.yml").write_text(yaml.safe_dump(groups))
    (folder / TESTS.name).write_text(TESTS.read_text())
    return subprocess.run(
        [tool("promtool"), "test", "rules", str(folder / TESTS.name)],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip


def rule_names() -> list[str]:
    """The names of all alerts."""
    return [rule["alert"] for rule in RULES]


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    """The committed rules are valid, with the templates of their annotations."""
    assert f"{len(rule_names())} rules found" in promtool("check", "rules", str(rules_file(tmp_path)))


def test_every_alert_passes_its_unit_tests(tmp_path: Path) -> None:
    """The alerts fire when they should, and not otherwise."""
    done = checked_with(tmp_path)
    assert "SUCCESS" in done.stdout, done.stdout + done.stderr


def test_the_alerts_unit_tests_detect_rules_that_never_fire(tmp_path: Path) -> None:
    """A rule that no longer fires fails its tests."""
    done = checked_with(tmp_path, expr="({}) and vector(1) == 2")
    assert done.returncode != 0
    for name in rule_names():
        assert f"alertname: {name}" in done.stdout + done.stderr
