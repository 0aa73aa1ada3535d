"""Evidence: asked for, bounded, private, and named when it is missing. Signals are sent to nobody here."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_run.watchdog import evidence

ME = os.getpid()


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """This process has a handler for the stack signal, as a rank with faulthandler has; what came is listed."""
    came: list[int] = []
    before = signal.signal(evidence.STACK_SIGNAL, lambda number, frame: came.append(number))
    yield came
    signal.signal(evidence.STACK_SIGNAL, before)


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """An open incident's directory."""
    folder = tmp_path / "0001-collecting"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bytes], dict[int, Path]]:
    """Rank 0 is this process, and writes the given stack at once when it is asked."""

    def answer(stack: bytes) -> dict[int, Path]:
        file = tmp_path / "rank0.stacks"
        file.touch(mode=0o600)

        def kill(pid: int, number: int) -> None:
            assert (pid, number) == (ME, evidence.STACK_SIGNAL)
            with open(file, "ab") as target:
                target.write(stack)

        monkeypatch.setattr(os, "kill", kill)
        return {0: file}

    return answer


@pytest.mark.usefixtures("caught")
def test_stacks_and_memory_are_copied(incident: Path, answering: Callable[[bytes], dict[int, Path]]) -> None:
    """What the rank wrote and what /proc tells lie in the incident, and nothing is missing."""
    assert evidence.collect(incident, {0: ME}, answering(b"Thread 0x1 (most recent call first)\n")) == []
    assert (incident / "stacks" / "rank0.txt").read_bytes() == b"Thread 0x1 (most recent call first)\n"
    assert f"Pid:\t{ME}" in (incident / "memory" / "rank0.status").read_text()
    assert {file.name for file in (incident / "memory").iterdir()} == {
        f"rank0.{name}" for name in evidence.PROC_FILES
    }


@pytest.mark.usefixtures("caught")
def test_evidence_is_private(incident: Path, answering: Callable[[bytes], dict[int, Path]]) -> None:
    """Folders 0700, files 0600."""
    evidence.collect(incident, {0: ME}, answering(b"stack\n"))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in incident.rglob("*")}
    assert {path for path, bits in modes.items() if bits != (0o700 if path.is_dir() else 0o600)} == set()


@pytest.mark.usefixtures("caught")
def test_a_rank_that_does_not_answer_is_named(
    incident: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the deadline the missing stack is said, not passed over."""
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    file = tmp_path / "rank0.stacks"
    file.touch()
    missing = evidence.collect(incident, {0: ME}, {0: file})
    assert missing == [f"rank 0: no stack within {evidence.STACK_DEADLINE_SECONDS} s"]


def test_a_rank_that_is_gone_is_named(
    incident: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may end between the fault and the question; the others' evidence is still taken."""

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    missing = evidence.collect(incident, {3: 2**22 + 1}, {3: tmp_path / "rank3.stacks"})
    assert "rank 3: gone before its stack was asked for" in missing
    assert sum("/proc/" in line for line in missing) == len(evidence.PROC_FILES)


def test_a_dead_ranks_last_words_are_kept(incident: Path, tmp_path: Path) -> None:
    """A crash writes its own stack; it belongs to the evidence although nobody is left to ask."""
    file = tmp_path / "rank1.stacks"
    file.write_bytes(b"Fatal Python error: Segmentation fault\n")
    assert evidence.collect(incident, {}, {1: file}) == []
    assert (incident / "stacks" / "rank1.txt").read_bytes() == b"Fatal Python error: Segmentation fault\n"


def test_evidence_is_bounded(incident: Path, tmp_path: Path) -> None:
    """A stack file that grew without end is cut to its last part."""
    file = tmp_path / "rank1.stacks"
    file.write_bytes(b"x" * evidence.MAX_FILE_BYTES + b"the end")
    evidence.collect(incident, {}, {1: file})
    kept = (incident / "stacks" / "rank1.txt").read_bytes()
    assert len(kept) == evidence.MAX_FILE_BYTES
    assert kept.endswith(b"the end")


def test_a_rank_that_cannot_write_stacks_yet_is_not_killed_by_the_question(
    incident: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The signal's default action ends a process: one without a handler must be left alone, and named."""
    assert signal.getsignal(evidence.STACK_SIGNAL) == signal.SIG_DFL
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    missing = evidence.collect(incident, {0: ME}, {0: tmp_path / "rank0.stacks"})
    assert sent == []
    assert any(line.startswith("rank 0:") for line in missing)
