"""Callbacks of the script resume with their state: a killed run ends at the same step with the same
weights.
"""

from __future__ import annotations

from pathlib import Path

from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

SCRIPT = str(SCRIPTS / "early_stopping.py")
STEPS = ("--max-steps", "9", "--save-steps", "1")


def test_early_stopping_and_a_stateful_callback_survive_a_kill_after_every_save(
    runs: Runs, tmp_path: Path
) -> None:
    """Also after the save of the last step, where the callback had already ended the call."""
    plain = tmp_path / "plain"
    plain.mkdir()
    plain_ranks(plain, [SCRIPT, "--output-dir", "out", *STEPS], ranks=2)
    stopped_at = int((plain / "steps-0.txt").read_text())
    assert 3 <= stopped_at < 9, "the callback must end the call early, after its patience"
    kills = [str(step) for step in range(1, stopped_at + 1)]
    run = runs(
        "--nproc-per-node", "2", "--max-restarts", "20", SCRIPT, "--output-dir", "ours", *STEPS,
        "--kill-after-saves", *kills,
    ).start().ended()  # fmt: skip
    assert len(run.status()["recoveries"]) == len(kills), run.tail()
    assert int((tmp_path / "steps-0.txt").read_text()) == stopped_at
    assert digest(tmp_path / "ours") == digest(plain / "out")
