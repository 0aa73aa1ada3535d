"""`grpo-run serve` and `grpo-run top`: which run they show, and a frame of the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.incidents import write_incident
from support.journal import event

from grpo_run.cli.main import main
from grpo_run.cli.serve import find
from grpo_run.cli.top import sparkline, stacks_of
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.journal import Journal

Captured = pytest.CaptureFixture[str]


def test_a_run_or_a_folder_of_runs_can_be_named(here: Path) -> None:
    """Of a folder, the newest run; nothing else is a run."""
    run = write_incident(here)
    for name in (None, "night", "runs/night", "runs", str(here / "runs")):
        assert find(name)[1].path.resolve() == run.path.resolve(), name
    assert find(str(here / "runs"))[0] == here / "runs"
    for name in ("day", str(here / "out")):
        with pytest.raises(RunDirectoryError):
            find(name)


def test_one_frame_has_the_verdict_first(here: Path, capsys: Captured) -> None:
    """Then the facts and the incidents; no line is wider than a terminal, and nothing controls it."""
    run = write_incident(here)
    journal = Journal(run.journal, "night")
    for step in range(42, 60):
        journal.write(event("step_logged", rank=0, step=step, train_call=1, reward=step / 100))
    journal.write(
        event("incident", step=60, cause="exception", culprit=0, signature="t", sentence="\x1b[2J" + "x" * 9)
    )
    journal.write(event("action", action="stop"))
    journal.write(event("run_ended", exit_code=93, sentence="\x1b]0;taken\x07 Gave up.\0"))
    assert main(["top", "night", "--once"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].rstrip() == "␛[2Jxxxxxxxxx"
    assert lines[1].rstrip() == "␛]0;taken␇ Gave up.␀"
    assert max(map(len, lines)) <= 80
    assert not any(char < " " for char in printed.replace("\n", ""))
    assert "▁" in printed
    assert "step 40" in printed


@pytest.mark.usefixtures("run")
def test_a_run_without_steps_has_a_frame(capsys: Captured) -> None:
    """Nothing is known of it yet."""
    assert main(["top", "--once"]) == 0
    assert "not counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0], "▁"), ([0, 7], "▁█"), ([1, 1, 1], "▁▁▁"), (range(16), "▁▂▃▄▅▆▇█")]
)
def test_a_curve_is_a_line_of_blocks(values: list[float], expected: str) -> None:
    """Of at most the given width."""
    assert sparkline([(0, value, value, value) for value in values], 8) == expected


def test_stacks_are_read_without_a_pause_and_with_their_cost() -> None:
    """Of a process that has ended, the reason is shown."""
    code = "import time\ndef waits_here():\n    print('x', flush=True)\n    time.sleep(600)\nwaits_here()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while "waits_here" not in (text := stacks_of(process.pid)):
            assert time.monotonic() < deadline, text
    finally:
        process.kill()
        process.communicate()
    assert text.startswith("py-spy took ")
    assert "waits_here" not in stacks_of(process.pid)


def test_the_server_yields_to_training(here: Path) -> None:
    """The lowest niceness, and a policy that only runs when nothing else does; its address has the token."""
    write_incident(here)
    environment = {**os.environ, "XDG_STATE_HOME": str(here / "state")}
    command = [sys.executable, "-P", "-m", "grpo_run.cli.main", "serve", "--address", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        token = (here / "state" / "grpo-run" / "serve.token").read_text().strip()
        assert token in line
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
    finally:
        process.terminate()
        assert process.wait(60) in (0, -15)
