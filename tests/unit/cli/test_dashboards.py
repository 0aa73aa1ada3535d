"""`grpo-run dashboards export` writes files that fit together, and replaces nothing without being told to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.provisioned import PAGES

from grpo_run.cli.dashboards import main
from grpo_run.runtime.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["export", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_the_files_refer_to_one_another(folder: Path) -> None:
    """The compose file mounts what is written, Prometheus reads the runs' targets and the rules, and Grafana
    finds all dashboards and its first page.
    """
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounts = [volume for service in services.values() for volume in service["volumes"]]
    local = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert all((folder / name).is_dir() for name in local)
    assert f"{folder.parent}/state/grpo-run/targets:/etc/prometheus/targets:ro" in mounts
    prometheus = yaml.safe_load((folder / "prometheus/prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["file_sd_configs"][0]["files"] == ["targets/*.json"]
    assert (folder / "prometheus" / prometheus["rule_files"][0]).is_file()
    pages = {path.stem for path in (folder / "grafana/dashboards").iterdir()}
    assert pages == {f"grpo-run-{name}" for name in PAGES}
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert json.loads((folder / "grafana/dashboards" / home.name).read_text())["uid"] == home.stem


def test_a_changed_file_is_replaced_with_force_only(folder: Path) -> None:
    """A receiver that the user has added to Alertmanager's configuration is not lost."""
    changed = folder / "alertmanager/alertmanager.yml"
    written = changed.read_text()
    assert main(["export", str(folder)]) == 0  # the same files
    changed.write_text("receivers: []\n")
    with pytest.raises(UsageError, match=r"alertmanager\.yml exists with other content; use --force"):
        main(["export", str(folder)])
    assert changed.read_text() == "receivers: []\n"
    assert main(["export", "--force", str(folder)]) == 0
    assert changed.read_text() == written


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """One line says which path, and why."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*file"):
        main(["export", str(tmp_path / "file" / "out")])


def test_alerts_link_to_the_runbook_that_is_named(tmp_path: Path) -> None:
    """By default to that of `grpo-run serve` on this machine."""
    for options, base in (
        ([], "http://127.0.0.1:9480/runbook"),
        (["--force", "--runbook-base", "https://wiki.example/grpo"], "https://wiki.example/grpo"),
    ):
        assert main(["export", str(tmp_path / "out"), *options]) == 0
        rules = yaml.safe_load((tmp_path / "out/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
        assert {rule["annotations"]["runbook_url"].partition("#")[0] for rule in rules} == {base}


def test_a_runbook_base_that_is_no_address_is_refused(tmp_path: Path) -> None:
    """Grafana would make a link inside itself of it."""
    with pytest.raises(UsageError, match="--runbook-base 'docs' is not an address"):
        main(["export", str(tmp_path / "out"), "--runbook-base", "docs"])
    assert not (tmp_path / "out").exists()
