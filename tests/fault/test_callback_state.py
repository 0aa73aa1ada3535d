"""Callbacks of the script resume with their state: a killed run ends at the same step with the same
weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
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


@pytest.mark.full
def test_each_run_of_a_tracker_has_whole_steps_after_a_recovery(runs: Runs, tmp_path: Path) -> None:
    """Repeated steps are reported to the run that the tracker has opened after the fault, and to no other."""
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "3", "--inject", "kill@rank1:step5", SCRIPT,
        "--output-dir", "ours",
        "--max-steps", "8", "--save-steps", "8", "--logging-steps", "1", "--patience", "99",
    ).start().ended()  # fmt: skip
    reported: dict[str, list[tuple[str, int]]] = {}
    for line in (tmp_path / "tracker.txt").read_text().splitlines():
        run_id, event, step = line.split()
        reported.setdefault(run_id, []).append((event, int(step)))
    before, after = reported.values()
    resumed_from = after[0][1]
    assert 3 <= resumed_from < before[-1][1], "the fault must repeat a step"

    def steps(first: int, last: int) -> list[tuple[str, int]]:
        return [
            ("begin", first),
            *((e, step) for step in range(first + 1, last + 1) for e in ("step", "log")),
        ]

    assert before in (steps(0, before[-1][1]), steps(0, before[-1][1])[:-1])
    assert after == steps(resumed_from, 8)
    assert "cannot hold" not in run.tail(), "the path never changes, and the file is opened again"
