"""Failures of the supervisor itself: the ranks save and stop, and a report names the cause."""

from __future__ import annotations

import json
from pathlib import Path

from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest, special
from support.trainer_and_loop import TRAINER

GRPO = (
    "--nproc-per-node", "2", str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "16",
    "--save-steps", "8", "--step-seconds", "0.05",
)  # fmt: skip


def reported(run: Run) -> dict[str, str]:
    """Return the report that the one line on the terminal names."""
    (line,) = [line for line in run.output.read_text().splitlines() if "Report: " in line]
    report: dict[str, str] = json.loads(Path(line.partition("Report: ")[2].strip()).read_text())
    assert "Traceback" not in run.output.read_text()
    return report


def test_after_a_failure_of_the_supervisor_the_same_command_resumes(runs: Runs, tmp_path: Path) -> None:
    """The ranks save at an agreed step: code 75, equal weights in the end."""
    run = runs("--on-end", "cat > end.json", *GRPO, program=special("failing"))
    with run.held(after=3):
        run.start().until_step(3)
        (tmp_path / "fail").touch()
        run.until(lambda events: "grpo-run itself failed" in run.output.read_text())
    run.ended(75)
    report = reported(run)
    assert report["sentence"].startswith("grpo-run itself failed, in the supervisor: KeyError")
    assert "Traceback" in report["traceback"]
    status = run.status()
    assert status["checkpoint"]["step"] >= 3
    assert status["state"] == "stopped"
    end = json.loads((tmp_path / "end.json").read_bytes())
    assert (end["state"], end["exit_code"]) == ("stopped", 75)
    assert end["sentence"].startswith("grpo-run itself failed")
    (tmp_path / "fail").unlink()
    run.start().ended()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 16)
