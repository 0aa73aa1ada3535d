"""One command launched twice at the same time, with two run directories."""

from __future__ import annotations

from pathlib import Path

from support.runs import SCRIPTS, Runs

SCRIPT = str(SCRIPTS / "sft.py")
LAST_STEP = 12
STEPS = ("--max-steps", str(LAST_STEP), "--save-steps", "2")


def test_a_second_live_launch_into_one_output_directory_is_refused(runs: Runs, tmp_path: Path) -> None:
    """Both are the same run by their command; the second leaves the first one's checkpoints alone."""
    words = (SCRIPT, "--output-dir", "out", *STEPS)
    first = runs(*words, name="first")
    with first.held(after=3):
        first.start().until_step(3)
        second = runs(*words, name="second").start()
        second.ended(2)
    assert f"is live in {first.directory}" in second.printed()
    first.ended()
    assert first.status()["recoveries"] == []
    assert (tmp_path / "out" / f"checkpoint-{LAST_STEP}" / "MANIFEST.json").is_file()
