"""A program starts runs with `launch(RunRequest)`, without a command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import warm
from support.references import undisturbed
from support.runs import SCRIPTS, digest


def test_a_program_launches_runs_and_is_left_as_it_was(tmp_path: Path) -> None:
    """A run with a kill ends in the undisturbed weights; the same request has finished then; another run
    follows in the same process, whose signal handlers, variables and streams are its own again.
    """
    code, printed = warm.run(
        [sys.executable, "-P", str(SCRIPTS / "launches.py"), str(SCRIPTS / "grpo.py")], cwd=tmp_path,
        timeout_seconds=240.0,
    )  # fmt: skip
    assert code == 0, printed
    seen = json.loads((tmp_path / "seen.json").read_text())
    killed, again, other = seen["killed"], seen["again"], seen["other"]
    assert (killed["exit_code"], killed["state"]) == (0, "finished"), printed
    assert killed["recoveries"] == ["signal"]
    assert killed["sentence"] in printed
    assert digest(tmp_path / "out") == undisturbed("grpo.py", 4)
    assert (again["exit_code"], again["state"]) == (0, "finished")
    assert "has finished. Use --fresh" in again["sentence"]
    assert again["directory"] == killed["directory"] == str(tmp_path / "first")
    assert seen["refused"].startswith("--nproc-per-node none: ")
    assert (other["exit_code"], other["state"]) == (0, "finished"), printed
    (log,) = (tmp_path / "second").glob("attempts/*/rank0.log")
    assert log.read_text().endswith("of another run\n")
    assert seen["changed"] == []
    assert seen["thread"] == "launch() handles signals: call it from the main thread"
