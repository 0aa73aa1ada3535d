"""`grpo-run launch` in a real terminal: what is above the progress line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import BIN, WITH_SCRIPTS, before_training
from support.terminals import terminal
from support.warm import QUIET

START_SECONDS = 240.0
"""A cold start beside other tests."""
SAID = """    import os
    print("rank", os.environ["RANK"], "says so", flush=True)
"""


@pytest.mark.full
def test_rank_0_is_shown_above_the_progress_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without progress bars and the metrics of steps; the start says how all of it is seen."""
    for name, value in (QUIET | WITH_SCRIPTS).items():
        monkeypatch.setenv(name, value)
    before_training(tmp_path / "train.py", SAID)
    command = [
        str(BIN / "grpo-run"), "launch", "--metrics-addr", "off", "--run-dir", "run", "--nproc-per-node", "2",
        "train.py", "--output-dir", "out", "--max-steps", "12", "--step-seconds", "0.3", "--settings",
        '{"logging_steps": 1, "disable_tqdm": false}',
    ]  # fmt: skip
    with terminal(command, tmp_path) as (screen, process):
        text = screen.wait(lambda text: "/12" in text and "2 ranks" in text, seconds=START_SECONDS)
        assert "[rank0] rank 0 says so" in text
        lines = screen.all_lines()
        assert process.wait(30.0) == 0
    whole = " ".join(" ".join(lines).split())
    assert "grpo-run logs -f run`" in whole
    assert "grpo-run status run`" in whole
    assert "rank 1 says so" not in whole
    for left_out in ("'epoch'", "%|", "it/s]"):
        assert left_out not in whole
    assert "Finished at step 12 of 12" in whole
    logged = (tmp_path / "run" / "attempts" / "000" / "rank0.log").read_text()
    assert "'epoch'" in logged
    assert "rank 1 says so" in (tmp_path / "run" / "attempts" / "000" / "rank1.log").read_text()
