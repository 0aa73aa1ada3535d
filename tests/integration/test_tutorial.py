"""The tutorial of docs/guide/start.md, command by command, as it is typed in a clone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support.runs import BIN, QUIET

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "guide" / "start.md"
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND_SECONDS = 240


def section(number: int) -> list[list[str]]:
    """Return the commands of a numbered section, in order."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {number}. ")[2].partition("\n## ")[0]
    lines = "".join(SHELL.findall(text)).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    """Launch, status, kill, stop, resume and report; page and terminal view have tests of their own."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    environment = {**os.environ, **QUIET, "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(words: list[str], code: int = 0) -> str:
        answer = subprocess.run(
            [str(BIN / words[0]), *words[1:]], cwd=tmp_path, env=environment,
            capture_output=True, text=True, timeout=COMMAND_SECONDS,
        )  # fmt: skip
        assert answer.returncode == code, answer.stdout[-3000:] + answer.stderr[-3000:]
        return answer.stdout + answer.stderr

    launch, status = section(2)
    assert "Finished at step 40 of 40, no faults." in run(launch)
    assert "finished" in run(status)
    assert "has finished" in run(launch)
    (killed,) = section(3)
    printed = run(killed)
    assert "FAULT Rank 1 was killed by SIGKILL in step 17" in printed
    assert "resumed from step 15, 1 step repeated" in printed
    report, incident = section(6)
    run(report)
    run(incident)
    assert len(list(tmp_path.glob("runs/grpo-*/report.html"))) == 1
    train, again = section(4)
    assert train == again
    for step in ("Stopped at step", "resumes from"):
        recipe = subprocess.Popen(
            [str(BIN / train[0]), *train[1:]], cwd=tmp_path, env=environment,
            stdout=subprocess.DEVNULL, stderr=(tmp_path / "recipe").open("w"),
        )  # fmt: skip
        deadline = time.monotonic() + COMMAND_SECONDS
        while "step " not in (tmp_path / "recipe").read_text() and time.monotonic() < deadline:
            time.sleep(0.5)
        run(["grpo-run", "stop"])
        assert recipe.wait(timeout=COMMAND_SECONDS) == 75
        assert step in (tmp_path / "recipe").read_text()
