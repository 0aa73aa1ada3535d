"""The output directory of `grpo-run demo`. The demo itself is run by tests/integration/test_recipes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.cli.demo import MARKER, make_empty
from grpo_run.cli.main import main


def test_a_directory_of_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    """All files of the earlier demo are removed."""
    out = make_empty(tmp_path / "out")
    (out / "run").mkdir()
    assert make_empty(out) == out
    assert [path.name for path in out.iterdir()] == [MARKER]


def test_no_other_directory_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user's own directory is refused, in one line."""
    (tmp_path / "thesis.tex").touch()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "was not made by the demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null/x"])
def test_a_directory_that_cannot_be_made_is_one_line(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the option and the reason."""
    assert main(["demo", "--out", out]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"grpo-run: --out {out}: cannot be written: ")
    assert shown.count("\n") == 1
