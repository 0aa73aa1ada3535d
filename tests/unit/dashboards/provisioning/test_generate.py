"""The committed files are the generator's output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_run.dashboards.provisioning.generate import FOLDER, GENERATED, write_generated


@pytest.mark.parametrize("name", GENERATED)
def test_committed_file_is_up_to_date(name: str) -> None:
    """The committed file is up to date with the catalogue, the dashboard and the rules."""
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == GENERATED[name](), f"{name} is out of date; run `make generated`"


def test_files_are_written_below_the_given_root(tmp_path: Path) -> None:
    """The generator creates folders and returns the paths written."""
    written = write_generated(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in written} == set(GENERATED)
    assert (
        json.loads((tmp_path / "dashboards/grafana/grpo-run-ranks.json").read_text())["uid"]
        == "grpo-run-ranks"
    )
