"""The rank processes of one attempt, with fake processes."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

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
        self.released = True
        os.close(self.sentinel)


@dataclass
class Signals:
    """The signals that were sent to fake processes, which exit by SIGKILL."""

    made: list[FakeProcess]
    sent: list[tuple[int, int]] = field(default_factory=list)
    """As (pid, number)."""
    cooperative: set[int] = field(default_factory=set)
    """Pids that exit after SIGTERM."""

    def send(self, pid: int, number: int) -> None:
        """In the place of the system call."""
        self.sent.append((pid, number))
        # a stopped process handles SIGTERM once it is continued
        if number == signal.SIGKILL or (number == signal.SIGCONT and pid in self.cooperative):
            process = next(process for process in self.made if process.pid == pid)
            process.end(-signal.SIGKILL if number == signal.SIGKILL else 0)


@pytest.fixture
def made() -> list[FakeProcess]:
    """The fake processes that were started, in order."""
    return []


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch, made: list[FakeProcess]) -> Signals:
    """No signal has been sent."""
    signals = Signals(made)
    monkeypatch.setattr(ranks, "_send", signals.send)
    return signals


def spec(rank: int) -> RankSpec:
    """The specification of a rank, with the fields that these tests need."""
    return RankSpec(rank=rank, environment={}, log=Path("/dev/null"))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, made: list[FakeProcess], signals: Signals) -> Iterator[RankGroup]:
    """Global ranks 4 to 6 on this node, with pids 104 to 106."""

    def start(spec: RankSpec, entry: str, preloaded: bool) -> FakeProcess:
        made.append(FakeProcess(100 + spec.rank))
        return made[-1]

    monkeypatch.setattr(ranks, "_start", start)
    yield RankGroup([spec(4 + place) for place in range(3)], entry="m:f", preloaded=True)
    for process in made:
        process.end(0)


def test_ranks_that_have_not_exited_are_alive_by_their_local_ranks(group: RankGroup) -> None:
    """Waiting for them returns at its deadline."""
    assert group.wait(0.0) == []
    assert group.pids == group.alive == {0: 104, 1: 105, 2: 106}


def test_an_exit_is_returned_once(group: RankGroup, made: list[FakeProcess]) -> None:
    """It has the global rank and the pid, and the rank is no longer alive."""
    made[1].end(3)
    (exit,) = group.wait(5.0)
    assert (exit.rank, exit.pid, exit.exit_code, exit.signal, exit.order) == (5, 105, 3, None, 0)
    assert group.wait(0.0) == []
    assert group.alive == {0: 104, 2: 106}


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [(0, 0, None), (1, 1, None), (255, 255, None), (-9, None, 9), (-11, None, 11)],
)
def test_an_exit_has_either_a_code_or_a_signal(
    group: RankGroup, made: list[FakeProcess], code: int, exit_code: int | None, number: int | None
) -> None:
    """A killed rank has no exit code; a rank that exited has no signal."""
    made[0].end(code)
    (exit,) = group.wait(5.0)
    assert (exit.exit_code, exit.signal) == (exit_code, number)


def test_exits_are_numbered_in_the_order_observed(group: RankGroup, made: list[FakeProcess]) -> None:
    """The numbers have no gaps over several waits."""
    made[2].end(1)
    first = group.wait(5.0)
    made[0].end(1)
    made[1].end(1)
    rest = group.wait(5.0)
    assert [exit.order for exit in [*first, *rest]] == [0, 1, 2]
    assert group.alive == {}
    assert group.wait(5.0) == []


def test_a_rank_that_has_exited_is_not_signaled(
    group: RankGroup, made: list[FakeProcess], signals: Signals
) -> None:
    """Its pid may be in use again."""
    made[1].end(0)
    group.wait(5.0)
    group.kill()
    assert set(signals.sent) == {(104, 9), (106, 9)}
    assert group.alive == {}


def test_a_process_that_survives_sigkill_is_named(
    group: RankGroup, made: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a device: no other rank may be started on it, and the supervisor does not wait forever."""
    monkeypatch.setattr(ranks, "_send", lambda pid, number: None)
    monkeypatch.setattr(ranks, "KILL_DEADLINE_SECONDS", 0.0)
    made[0].end(0)
    group.wait(5.0)
    with pytest.raises(ProcessError, match=r"\[105, 106\] survived SIGKILL"):
        group.kill()


def test_releasing_closes_descriptors(group: RankGroup, made: list[FakeProcess]) -> None:
    """Attempts do not leak descriptors."""
    group.kill()
    group.release()
    assert all(process.released for process in made)


def test_no_rank_remains_if_one_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, made: list[FakeProcess], signals: Signals
) -> None:
    """The others would wait for it; the error names the rank."""

    def start(spec: RankSpec, entry: str, preloaded: bool) -> FakeProcess:
        if spec.rank == 1:
            raise OSError(11, "Resource temporarily unavailable")
        made.append(FakeProcess(100 + spec.rank))
        return made[-1]

    monkeypatch.setattr(ranks, "_start", start)
    monkeypatch.setattr(ranks, "RETRY_SECONDS", 0.0)
    with pytest.raises(ProcessError, match="rank 1 could not be started"):
        RankGroup([spec(0), spec(1)], entry="m:f", preloaded=False)
    assert [process.code for process in made] == [-9]


def test_ranks_receive_sigterm_first(group: RankGroup, made: list[FakeProcess], signals: Signals) -> None:
    """And SIGCONT, because a stopped rank handles no signal. Those that exit are not killed."""
    signals.cooperative |= {104, 105, 106}
    group.kill(grace_seconds=20.0)
    for pid in (104, 105, 106):
        assert [number for to, number in signals.sent if to == pid] == [signal.SIGTERM, signal.SIGCONT]
    assert {process.code for process in made} == {0}
    assert group.alive == {}


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(
    group: RankGroup, made: list[FakeProcess], signals: Signals
) -> None:
    """Only that rank was killed by a signal."""
    signals.cooperative |= {104, 106}
    group.kill(grace_seconds=0.01)
    assert [process.code for process in made] == [0, -signal.SIGKILL, 0]
    assert group.alive == {}


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_rank_is_started_once_the_machine_permits(
    monkeypatch: pytest.MonkeyPatch, made: list[FakeProcess], number: int
) -> None:
    """Memory, processes or descriptors are released a moment after ranks were killed."""
    tries = 0

    def start(spec: RankSpec, entry: str, preloaded: bool) -> FakeProcess:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(number, os.strerror(number))
        return FakeProcess(100 + spec.rank)

    monkeypatch.setattr(ranks, "_start", start)
    monkeypatch.setattr(ranks, "RETRY_EVERY_SECONDS", 0.0)
    assert RankGroup([spec(0)], entry="a:b", preloaded=True).pids == {0: 100}
    assert tries == 3
