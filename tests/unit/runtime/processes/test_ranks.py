"""The rank processes of one attempt, with fake processes; see the text file."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from support.transcripts import Story, stories

from grpo_run.runtime.errors import ProcessError
from grpo_run.runtime.processes import ranks
from grpo_run.runtime.processes.ranks import RankGroup, RankSpec


class FakeProcess:
    """A process that exits when a test says so."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel, self._hold = os.pipe()
        self.code: int | None = None
        self.released = False

    def end(self, code: int) -> None:
        """Exit; a negative code is a signal, as in `subprocess`."""
        if self.code is None:
            self.code = code
            os.close(self._hold)

    def poll(self) -> int | None:
        return self.code

    def release(self) -> None:
        if not self.released:
            self.released = True
            os.close(self.sentinel)


class RankShell:
    """Three ranks that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.made: list[FakeProcess] = []
        self.ever_made: list[FakeProcess] = []
        self.sent: list[tuple[int, int]] = []
        self.cooperative: set[int] = set()
        self.refusals: dict[int, list[OSError]] = {}
        monkeypatch.setattr(ranks, "_start", self._start)
        monkeypatch.setattr(ranks, "_send", self._send)
        monkeypatch.setattr(ranks, "RETRY_EVERY_SECONDS", 0.0)
        self.start("4", "5", "6")

    def start(self, *given: str) -> str | None:
        """Start ranks."""
        self.made = []
        specs = [RankSpec(rank=int(rank), environment={}, log=Path("/dev/null")) for rank in given]
        try:
            self.group = RankGroup(specs, entry="m:f", preloaded=True)
        except ProcessError as error:
            return str(error)
        return None

    def refuses(self, rank: str, times: str, error: str = "EAGAIN") -> None:
        """The machine does not start a rank so many times, or `forever`, for which it is not tried long."""
        if times == "forever":
            self.monkeypatch.setattr(ranks, "RETRY_SECONDS", 0.0)
        number = getattr(errno, error)
        count = 1000 if times == "forever" else int(times)
        self.refusals[int(rank)] = [OSError(number, os.strerror(number))] * count

    def exits(self, rank: str, code: str) -> None:
        """A rank exits; a negative code is a signal."""
        next(process for process in self.made if process.pid == 100 + int(rank)).end(int(code))

    def cooperates(self, *given: str) -> None:
        """These ranks exit after SIGTERM."""
        self.cooperative = {100 + int(rank) for rank in given}

    def survives(self) -> None:
        """No signal has an effect, and nobody waits for one."""
        self.monkeypatch.setattr(ranks, "_send", lambda pid, number: None)
        self.monkeypatch.setattr(ranks, "KILL_DEADLINE_SECONDS", 0.0)

    def wait(self, seconds: str = "5") -> str:
        """Exits since the last wait."""
        found = [
            f"rank {exit.rank}, pid {exit.pid}, code {exit.exit_code}, signal {exit.signal}, #{exit.order}"
            for exit in sorted(self.group.wait(float(seconds)), key=lambda exit: exit.order)
        ]
        return "\n".join(found) or "none"

    def kill(self, grace_seconds: str = "0") -> str | None:
        """Kill all ranks."""
        try:
            self.group.kill(grace_seconds=float(grace_seconds))
        except ProcessError as error:
            return str(error)
        return None

    def release(self) -> str:
        """Release the processes; answers which of them are."""
        self.group.release()
        return " ".join(str(process.pid) for process in self.made if process.released)

    def alive(self) -> str:
        """The pids of the ranks that are alive, by their local ranks."""
        return f"{self.group.alive} of {self.group.pids}"

    def signals(self) -> str:
        """The signals that each process has received."""
        pids = sorted({pid for pid, _ in self.sent})
        names = {pid: [signal.Signals(number).name for to, number in self.sent if to == pid] for pid in pids}
        return "\n".join(f"{pid} {' '.join(names[pid])}" for pid in pids) or "none"

    def codes(self) -> str:
        """How each process has ended."""
        return " ".join(f"{process.pid}:{process.code}" for process in self.made)

    def close(self) -> None:
        """End the processes, and close their pipes."""
        for process in self.ever_made:
            process.end(0)
            process.release()

    def _start(self, spec: RankSpec, entry: str, preloaded: bool) -> FakeProcess:
        if self.refusals.get(spec.rank):
            raise self.refusals[spec.rank].pop()
        self.made.append(FakeProcess(100 + spec.rank))
        self.ever_made.append(self.made[-1])
        return self.made[-1]

    def _send(self, pid: int, number: int) -> None:
        self.sent.append((pid, number))
        # a stopped process handles SIGTERM once it is continued
        if number == signal.SIGKILL or (number == signal.SIGCONT and pid in self.cooperative):
            process = next(process for process in self.made if process.pid == pid)
            process.end(-signal.SIGKILL if number == signal.SIGKILL else 0)


@stories(__file__, "ranks.txt")
def test_ranks(story: Story, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story of the file."""
    shell = RankShell(monkeypatch)
    story.check(shell, word)
    shell.close()
