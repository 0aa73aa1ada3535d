"""Evidence is limited, private, and listed if it is missing. No other process is signalled here."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence import collection, incident_files, stack_capture
from grpo_run.watchdog.evidence import collection as process_files

ME = os.getpid()
SECONDS = stack_capture.STACK_DEADLINE_SECONDS
DUMP = (
    b'Thread 0x01 (most recent call first):\n  File "/usr/x.py", line 1 in wait\n\n'
    b'Current thread 0x02 (most recent call first):\n  File "/home/me/train.py", line 88 in reward\n'
    b'  File "/home/me/train.py", line 120 in <module>\n'
)
SPIED = 'Process 1: python\nThread 1 (active): "MainThread"\n    judge (/home/me/judge.py:7)\n'


def no_spy(pid: int, file: Path, native: bool, timeout_seconds: float) -> str | None:
    """py-spy that is not installed."""
    return "py-spy is not installed"


collect = collection.collect


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a driver and without py-spy."""
    monkeypatch.setattr(stack_capture, "dump", no_spy)
    monkeypatch.setattr(collection, "read_gpu_memory", lambda: {"devices": []})


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """Handle the stack signal in this process, as a rank with faulthandler does; list the signals.

    What came is listed.
    """
    came: list[int] = []
    before = signal.signal(stack_capture.STACK_SIGNAL, lambda number, frame: came.append(number))
    yield came
    signal.signal(stack_capture.STACK_SIGNAL, before)


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """An open incident's directory."""
    folder = tmp_path / "0001-collecting"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    """Where rank 0 writes its stacks; empty."""
    file = tmp_path / "rank0.stacks"
    file.touch(mode=0o600)
    return file


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, stacks: Path) -> Callable[[bytes], dict[int, Path]]:
    """Rank 0 is this process, and writes the given stack at once when it is asked."""

    def answer(stack: bytes) -> dict[int, Path]:
        def kill(pid: int, number: int) -> None:
            assert (pid, number) == (ME, stack_capture.STACK_SIGNAL)
            with open(stacks, "ab") as target:
                target.write(stack)

        monkeypatch.setattr(os, "kill", kill)
        return {0: stacks}

    return answer


@pytest.mark.usefixtures("caught")
def test_stacks_and_memory_are_collected(
    incident: Path, answering: Callable[[bytes], dict[int, Path]]
) -> None:
    """The rank's stacks and its /proc files are in the incident, and nothing is missing."""
    found = collect(incident, {0: ME}, answering(DUMP), rank_memory={0: {"readings": 3}})
    assert found.missing == []
    assert json.loads((incident / "memory" / "phases.json").read_text()) == {"0": {"readings": 3}}
    assert [stack.main for stack in found.stacks[0]] == [False, True]
    assert (incident / "stacks" / "rank0.txt").read_bytes() == DUMP
    assert "rank 0:\n> reward (/home/me/train.py:88)" in (incident / "stacks" / "folded.txt").read_text()
    assert f"Pid:\t{ME}" in (incident / "memory" / "rank0.status").read_text()
    assert "MemAvailable" in (incident / "memory" / "node.txt").read_text()
    assert json.loads((incident / "memory" / "gpu.json").read_text()) == {"devices": []}
    assert {file.name for file in (incident / "proc").iterdir()} == {
        f"rank0.{name}" for name in (*process_files.PROC_FILES, "children")
    }


@pytest.mark.usefixtures("caught")
def test_evidence_is_private(incident: Path, answering: Callable[[bytes], dict[int, Path]]) -> None:
    """Directories have mode 0700, files 0600."""
    collect(incident, {0: ME}, answering(DUMP), recordings={0: b"{}"}, collective_logs={0: []}, events=["{}"])
    assert (incident / "collectives" / "rank0.json").exists()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in incident.rglob("*")}
    assert {path for path, bits in modes.items() if bits != (0o700 if path.is_dir() else 0o600)} == set()


def test_the_stacks_of_a_crashed_rank_are_kept(incident: Path, tmp_path: Path) -> None:
    """A crash writes its own stack."""
    file = tmp_path / "rank1.stacks"
    words = b"Fatal Python error: Segmentation fault\n\n" + DUMP
    file.write_bytes(words)
    found = collect(incident, {}, {1: file})
    assert found.missing == []
    assert found.stacks[1][-1].frames[0].function == "reward"
    assert (incident / "stacks" / "rank1.txt").read_bytes() == words


def test_evidence_is_limited_in_size(incident: Path, tmp_path: Path) -> None:
    """A long stack file is cut to its end."""
    file = tmp_path / "rank1.stacks"
    file.write_bytes(b"x" * incident_files.MAX_FILE_BYTES + b"the end")
    collect(incident, {}, {1: file})
    kept = (incident / "stacks" / "rank1.txt").read_bytes()
    assert len(kept) == incident_files.MAX_FILE_BYTES
    assert kept.endswith(b"the end")


@pytest.mark.usefixtures("caught")
def test_a_dump_that_comes_in_two_halves_is_waited_for(
    incident: Path, monkeypatch: pytest.MonkeyPatch, stacks: Path
) -> None:
    """On a busy machine the handler may be descheduled between two threads; the main one comes last."""
    halves = iter(DUMP.partition(b"Current")[::2])
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 4:
            with open(stacks, "ab") as target:
                target.write(b"Current" + next(halves))

    def kill(pid: int, number: int) -> None:
        stacks.write_bytes(next(halves))

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(time, "sleep", sleep)
    assert [stack.main for stack in collect(incident, {0: ME}, {0: stacks}).stacks[0]] == [False, True]


@pytest.fixture
def spying(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """py-spy that works without native frames only: the list of what was asked of it."""
    asked: list[bool] = []

    def spy(pid: int, file: Path, native: bool, timeout_seconds: float) -> str | None:
        asked.append(native)
        if native:
            return "no symbols"
        file.write_text(SPIED)
        return None

    monkeypatch.setattr(stack_capture, "dump", spy)
    return asked


def test_a_rank_without_a_handler_is_read_by_py_spy(incident: Path, spying: list[bool]) -> None:
    """py-spy's stack counts as its stack, without native frames where these fail."""
    found = collect(incident, {0: ME}, {})
    assert found.missing == []
    assert spying == [True, False]
    assert found.stacks[0][0].frames[0].file == "/home/me/judge.py"
    assert (incident / "stacks" / "rank0.native.txt").read_text() == SPIED


def test_a_stopped_rank_is_not_paused(
    incident: Path, spying: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """py-spy cannot pause a stopped process, and no signal reaches it."""
    monkeypatch.setattr(processes, "read_state", lambda pid: "T")
    found = collect(incident, {0: ME}, {0: incident / "none"})
    assert spying == [False]
    assert found.missing == []


@pytest.mark.usefixtures("caught")
def test_a_stuck_interpreter_is_dumped_twice(
    incident: Path, answering: Callable[[bytes], dict[int, Path]]
) -> None:
    """Its faulthandler stack is used; missing native frames are listed."""
    found = collect(incident, {0: ME}, answering(DUMP), interpreter_stuck={0, 5})
    assert found.stacks[0][-1].frames[0].function == "reward"
    assert found.missing == ["rank 0: no native stack: py-spy: py-spy is not installed"]


def test_a_py_spy_that_hangs_is_abandoned(incident: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline covers everything together, and the gap is listed."""
    forever = threading.Event()

    def spy(pid: int, file: Path, native: bool, timeout_seconds: float) -> str | None:
        forever.wait()
        return "too late"

    monkeypatch.setattr(stack_capture, "dump", spy)
    monkeypatch.setattr(collection, "DEADLINE_SECONDS", 0.5)
    found = collect(incident, {0: ME}, {})
    forever.set()
    assert found.missing == ["rank 0: no file for its stacks, and py-spy: no answer in time"]


def test_a_gpu_driver_that_hangs_is_abandoned(incident: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap is listed."""
    forever = threading.Event()
    monkeypatch.setattr(collection, "read_gpu_memory", lambda: forever.wait() and None)
    monkeypatch.setattr(collection, "GPU_SECONDS", 0.05)
    missing = collect(incident, {}, {}).missing
    forever.set()
    assert missing == ["GPU memory: the driver did not answer within 0.05 s"]


def test_recordings_are_cut_to_their_last_entries(incident: Path) -> None:
    """A long recording loses its oldest entries and stays valid JSON; anything else is listed as missing."""
    entries = [{"record_id": number, "text": "x" * 1000} for number in range(1000)]
    missing = collect(
        incident,
        {},
        {},
        recordings={0: json.dumps({"entries": entries}).encode(), 1: b"\xff{"},
        collective_logs={0: [1]},
    ).missing
    file = incident / "collectives" / "rank0.json"
    assert file.stat().st_size <= collection.MAX_COLLECTIVES_BYTES
    kept = json.loads(file.read_text())
    assert kept["entries"][-1]["record_id"] == 999
    assert kept["truncated"] is True
    assert json.loads((incident / "collectives" / "rank0.notes.json").read_text()) == [1]
    assert missing == ["rank 1: its Flight Recorder entries are not readable (2 bytes)"]


def test_the_last_events_are_kept(incident: Path) -> None:
    """The file has one event per line, up to a maximum."""
    collect(incident, {}, {}, events=[f'{{"event": {number}}}' for number in range(500)])
    lines = (incident / "events.jsonl").read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ('{"event": 300}', '{"event": 499}', collection.MAX_EVENTS)


def refuse(pid: int, number: int) -> None:
    """What the kernel does for a process of another user."""
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("pid", "before", "kill", "missing"),
    [
        (ME, b"", lambda pid, number: None, f"no stack within {SECONDS} s, and py-spy: py-spy is not"),
        # what it wrote at an earlier incident does not show where it is now
        (ME, DUMP, lambda pid, number: None, "no stack within"),
        (ME, b"", refuse, "process of another user, which may not be signalled"),
        (2**22 + 1, b"", refuse, "exited before its stack was requested"),
    ],
    ids=["silent", "silent since", "refused", "gone"],  # not by number: workers would collect other names
)  # fmt: skip
def test_a_rank_whose_stack_does_not_come_is_named(
    incident: Path, caught: list[int], monkeypatch: pytest.MonkeyPatch, stacks: Path, pid: int, before: bytes,
    kill: Callable[[int, int], None], missing: str,
) -> None:  # fmt: skip
    """With the reason. It may exit between the fault and the request; other evidence is still collected."""
    monkeypatch.setattr(os, "kill", kill)
    stacks.write_bytes(before)
    found = collect(incident, {0: pid}, {0: stacks})
    assert found.stacks == {}
    assert sum(line.startswith(f"rank 0: {missing}") or missing in line for line in found.missing) == 1
    gone = pid != ME
    assert sum("/proc/" in line for line in found.missing) == gone * (len(process_files.PROC_FILES) + 1)
    assert (incident / "memory" / "gpu.json").exists()


def test_a_rank_without_a_handler_is_not_signalled(
    incident: Path, monkeypatch: pytest.MonkeyPatch, stacks: Path
) -> None:
    """The signal's default action would kill the process; the rank is named instead."""
    assert signal.getsignal(stack_capture.STACK_SIGNAL) == signal.SIG_DFL
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    missing = collect(incident, {0: ME}, {0: stacks}).missing
    assert sent == []
    assert any(line.startswith("rank 0: not ready to write stacks") for line in missing)
