"""The committed files are what the generator makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_run.dashboards.provisioning.generate import FOLDER, GENERATED, write_generated


@pytest.mark.parametrize("name", GENERATED)
def test_committed_file_is_not_stale(name: str) -> None:
    """A change to the catalogue, dashboard or rules comes with its files."""
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == GENERATED[name](), (
        f"{name} is stale: run `python -P -m grpo_run.dashboards.generated`"
    )


def test_files_are_written_where_asked(tmp_path: Path) -> None:
    """The generator makes its folders and returns what it wrote."""
    written = write_generated(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in written} == set(GENERATED)
    assert json.loads((tmp_path / "grafana/grpo-run.json").read_text())["uid"] == "grpo-run"
