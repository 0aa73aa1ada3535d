"""The output directory of `grpo-run demo`. The demo itself is run by tests/integration/test_recipes.py."""

from __future__ import annotations

from pathlib import Path

from grpo_run.cli.demo import MARKER, make_empty


def test_a_directory_of_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    """All files of the earlier demo are removed."""
    out = make_empty(tmp_path / "out")
    (out / "run").mkdir()
    assert make_empty(out) == out
    assert [path.name for path in out.iterdir()] == [MARKER]
