"""`grpo-run doctor` and `launch --preflight`: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.cli import doctor, launch
from grpo_run.cli.launching import preflight
from grpo_run.cli.launching.command import parse
from grpo_run.cli.main import main
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.recovery import Checkpoint
from grpo_run.runtime.preflight.checks import Finding, State
from grpo_run.runtime.upstream.features import Feature

Captured = pytest.CaptureFixture[str]
SOUND = Finding(name="clock", state=State.ok, text="tsc")
SMALL = Finding(name="shared memory", state=State.warn, text="64 MiB free", fix="--shm-size 16g")
FULL = Finding(name="disk", state=State.fail, text="1 MiB free", fix="make room")


def test_this_machine_has_no_problem(here: Path, capsys: Captured) -> None:
    """It never cries wolf. The speed of the disk and processes of killed runs depend on other tests."""
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    bad = [one for one in found["checks"] if one["state"] not in ("ok", "not applicable")]
    assert [one for one in bad if one["name"] not in ("disk speed", "left-over processes")] == []
    assert found["failed"] == 0
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_what_an_older_release_lacks_is_named(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a problem of the machine."""
    new = Feature(text="something new", since="trl>=99.9", needs={"GRPOTrainer": ("_new",)})
    monkeypatch.setattr(doctor, "FEATURES", (new,))
    assert main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "something new" in line)
    assert line.startswith("not applicable")
    assert line.endswith("off: something new, which needs trl>=99.9")


def test_limits_of_the_shell_are_found(tmp_path: Path) -> None:
    """As `ulimit` sets them."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    ran = subprocess.run(
        [sys.executable, "-P", "-m", "grpo_run.cli.main", "doctor", "--nproc-per-node", "2"], cwd=tmp_path,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "0"}, preexec_fn=lower, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    lines = {line.split()[1]: line for line in ran.stdout.splitlines() if line.startswith(("fail", "warn"))}
    assert lines["open"].endswith("100, and 160 are needed for 2 rank(s)")
    assert lines["disk"].endswith("no file can be written: File too large")
    assert lines["file"].endswith("at most 1.0 MiB")
    assert lines["flight"].startswith("warn")
    assert lines.keys() <= {"open", "disk", "file", "flight", "left-over"}, "other tests leave processes"
    assert f", {len(lines) - 3} warn, 3 fail, " in ran.stdout.splitlines()[-1]


def test_a_directory_that_cannot_be_is_an_error_of_usage() -> None:
    """In one line, as for every command."""
    with pytest.raises(UsageError, match="File name too long; name another directory"):
        doctor.main(["x" * 300])


@pytest.mark.parametrize(("findings", "code"), [([SOUND], 0), ([SOUND, SMALL], 0), ([SMALL, FULL], 1)])
def test_only_a_failure_changes_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, findings: list[Finding], code: int
) -> None:
    """What to do is in the line below."""
    monkeypatch.setattr(doctor, "examine", lambda facts: findings)
    monkeypatch.setattr(doctor, "read_facts", lambda *_, **__: SimpleNamespace(versions={}))
    assert main(["doctor"]) == code
    printed = capsys.readouterr().out
    assert all(one.text in printed and one.fix in printed for one in findings)
    if SMALL in findings:
        line, fix = printed.splitlines()[findings.index(SMALL) : findings.index(SMALL) + 2]
        assert line.split() == ["warn", "shared", "memory", "64", "MiB", "free"]
        assert fix.strip() == SMALL.fix


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nproc-per-node", "-1"], "--nproc-per-node -1: must be 0 (unknown) or more"),
        (["--master-port", "70000"], "--master-port 70000: must be a port from 1 to 65535"),
        (["--checkpoint-size", "3"], "give a unit, such as 80GiB"),
    ],
)
def test_wrong_values_are_refused(words: list[str], says: str, capsys: Captured) -> None:
    """With code 2."""
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


class Examined:
    """What is found, and what was asked."""

    def __init__(self) -> None:
        self.findings: list[Finding] = [SOUND]
        self.asked: list[dict[str, Any]] = []

    def read_facts(self, folder: Path, environment: dict[str, str], **known: Any) -> None:
        self.asked.append({"folder": folder, "environment": environment, **known})

    def examine(self, facts: object) -> list[Finding]:
        return self.findings


@pytest.fixture
def examined(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Examined]:
    """A machine of the test's choice."""
    machine = Examined()
    monkeypatch.setattr(preflight, "read_facts", machine.read_facts)
    monkeypatch.setattr(preflight, "examine", machine.examine)
    return machine


def test_a_failure_keeps_the_run_from_starting(
    here: Path, examined: Examined, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Nothing is created; warnings are printed. Without the option nothing is examined."""
    examined.findings = [SOUND, SMALL, FULL]
    assert main(["launch", "--preflight", "train.py"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "grpo-run: warning: shared memory: 64 MiB free; --shm-size 16g",
        "grpo-run: --preflight: disk: 1 MiB free; make room; `grpo-run doctor` shows all checks",
    ]
    assert [path.name for path in here.iterdir()] == ["train.py"]
    monkeypatch.setattr(launch, "open_listener", lambda _: (_ for _ in ()).throw(UsageError("went on")))
    assert main(["launch", "train.py"]) == 2
    examined.findings = [SOUND, SMALL]
    assert main(["launch", "--preflight", "train.py"]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if "went on" in line] == [
        "grpo-run: went on"
    ] * 2
    assert len(examined.asked) == 2


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ([], None),
        (["--master-port", "29511"], 29511),
        (["--master-port", "29511", "--nnodes", "2"], 29511),
        (["--master-port", "29511", "--nnodes", "2", "--node-rank", "1"], None),
        (["--master-port", "29511", "--standalone"], None),
        (["--master-port", "29511", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:1"], None),
    ],
)
def test_what_is_asked_follows_from_the_command(
    examined: Examined, words: list[str], port: int | None
) -> None:
    """The port is examined where this node will listen on it."""
    command = parse(["--nproc-per-node", "3", *words, "train.py"])
    preflight.check_first(command)
    (asked,) = examined.asked
    assert asked == {
        "folder": command.config.run_directory, "environment": command.config.environment, "ranks": 3,
        "port": port, "checkpoint_bytes": 0,
    }  # fmt: skip


def test_before_a_restart_a_failure_is_a_warning(here: Path, examined: Examined) -> None:
    """The next checkpoint will be as large as the last."""
    folder = here / "out" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(1 << 16))
    examined.findings = [SOUND, SMALL, FULL]
    said: list[str] = []
    command = parse(["train.py"])
    preflight.check_again(command, Checkpoint(step=3, path=str(folder), verified=True), said.append)
    assert said == ["warning: disk: 1 MiB free; make room"]
    assert examined.asked[0]["folder"] == here / "out"
    assert examined.asked[0]["checkpoint_bytes"] == 1 << 16


def test_a_driver_that_does_not_answer_delays_no_run(
    examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt is refused, a restart goes on."""
    answer = threading.Event()
    monkeypatch.setattr(preflight, "read_facts", lambda *_, **__: answer.wait())
    monkeypatch.setattr(preflight, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(preflight, "AGAIN_SECONDS", 0.05)
    command, said = parse(["train.py"]), []
    try:
        with pytest.raises(UsageError, match=r"checks: not done after 0\.05 s; does nvidia-smi answer\?"):
            preflight.check_first(command)
        preflight.check_again(command, None, said.append)
    finally:
        answer.set()
        for thread in threading.enumerate():
            if thread.name == "grpo-run-preflight":
                thread.join()
    assert said == ["warning: checks: not done after 0.05 s; does nvidia-smi answer?"]
