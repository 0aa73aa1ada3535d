"""The processes of one attempt, with stand-ins for the processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_run.runtime.errors import ProcessError
from grpo_run.runtime.processes import ranks
from grpo_run.runtime.processes.ranks import RankGroup, RankSpec


class StandIn:
    """A process that ends when it is told to."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel, self._hold = os.pipe()
        self.code: int | None = None
        self.released = False

    def end(self, code: int) -> None:
        """Let it end: negative for a signal, as Python says it."""
        if self.code is None:
            self.code = code
            os.close(self._hold)

    def poll(self) -> int | None:
        return self.code

    def release(self) -> None:
        self.released = True
        os.close(self.sentinel)


@pytest.fixture
def made() -> list[StandIn]:
    """The stand-ins that were started, in order."""
    return []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, made: list[StandIn]) -> list[tuple[int, int]]:
    """The signals that were sent, as (pid, number); SIGKILL ends a stand-in."""
    signals: list[tuple[int, int]] = []

    def send(function: object, pid: int, number: int) -> None:
        signals.append((pid, number))
        if number == signal.SIGKILL:
            next(process for process in made if process.pid == pid).end(-signal.SIGKILL)

    monkeypatch.setattr(ranks, "_send", send)
    return signals


def spec(rank: int, local_rank: int) -> RankSpec:
    """A rank's specification, as far as it is read here."""
    return RankSpec(rank=rank, local_rank=local_rank, environment={}, directory="/", log=Path("/dev/null"))


@pytest.fixture
def group(
    monkeypatch: pytest.MonkeyPatch, made: list[StandIn], sent: list[tuple[int, int]]
) -> Iterator[RankGroup]:
    """Global ranks 4 to 6 on this node, pids 104 to 106."""

    def start(spec: RankSpec, entry: str, preloaded: bool) -> StandIn:
        made.append(StandIn(100 + spec.rank))
        return made[-1]

    monkeypatch.setattr(ranks, "_start", start)
    yield RankGroup([spec(4 + place, place) for place in range(3)], entry="m:f", preloaded=True)
    for process in made:
        process.end(0)


def test_ranks_are_known_by_their_place(group: RankGroup) -> None:
    """Pids by local rank; all alive."""
    assert group.pids == group.alive == {0: 104, 1: 105, 2: 106}
    assert group.exits == {}


def test_waiting_for_nobody_returns_at_the_deadline(group: RankGroup) -> None:
    """Empty, not forever."""
    assert group.wait(0.0) == []


def test_an_exit_is_seen_once(group: RankGroup, made: list[StandIn]) -> None:
    """By global rank and pid; it is no longer among the living."""
    made[1].end(3)
    (exit,) = group.wait(5.0)
    assert (exit.rank, exit.pid, exit.exit_code, exit.signal, exit.order) == (5, 105, 3, None, 0)
    assert group.wait(0.0) == []
    assert group.alive == {0: 104, 2: 106}
    assert group.exits == {1: exit}


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [(0, 0, None), (1, 1, None), (255, 255, None), (-9, None, 9), (-11, None, 11)],
)
def test_exactly_one_of_code_and_signal_is_told(
    group: RankGroup, made: list[StandIn], code: int, exit_code: int | None, number: int | None
) -> None:
    """A killed rank has no exit code, a rank that left has no signal."""
    made[0].end(code)
    (exit,) = group.wait(5.0)
    assert (exit.exit_code, exit.signal) == (exit_code, number)


def test_exits_are_numbered_as_they_are_seen(group: RankGroup, made: list[StandIn]) -> None:
    """Without gaps, over several waits."""
    made[2].end(1)
    first = group.wait(5.0)
    made[0].end(1)
    made[1].end(1)
    rest = group.wait(5.0)
    assert [exit.order for exit in [*first, *rest]] == [0, 1, 2]
    assert group.alive == {}
    assert group.wait(5.0) == []


def test_killing_ends_all_and_their_groups(
    group: RankGroup, made: list[StandIn], sent: list[tuple[int, int]]
) -> None:
    """Also the group of a leader that has left: it may have left members behind."""
    made[1].end(0)
    group.wait(5.0)
    group.kill()
    assert {(104, 9), (105, 9), (106, 9)} <= set(sent)
    assert group.alive == {}


def test_a_process_that_survives_the_kill_is_named(
    group: RankGroup, made: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a device: the supervisor must not start another on it, nor wait for ever."""
    monkeypatch.setattr(ranks, "_send", lambda function, pid, number: None)
    monkeypatch.setattr(ranks, "KILL_DEADLINE_SECONDS", 0.0)
    made[0].end(0)
    group.wait(5.0)
    with pytest.raises(ProcessError, match=r"\[105, 106\] survived SIGKILL"):
        group.kill()


def test_signals_reach_the_living_only(
    group: RankGroup, made: list[StandIn], sent: list[tuple[int, int]]
) -> None:
    """A pid of a rank that has ended may be somebody else's by now."""
    made[0].end(0)
    group.wait(5.0)
    group.signal(signal.SIGUSR1)
    assert sent == [(105, signal.SIGUSR1), (106, signal.SIGUSR1)]


def test_releasing_gives_descriptors_back(group: RankGroup, made: list[StandIn]) -> None:
    """Every attempt would leak some otherwise."""
    group.kill()
    group.release()
    assert all(process.released for process in made)


def test_when_one_cannot_be_started_none_is_left(
    monkeypatch: pytest.MonkeyPatch, made: list[StandIn], sent: list[tuple[int, int]]
) -> None:
    """Half an attempt would wait for the other half; the rank is named."""

    def start(spec: RankSpec, entry: str, preloaded: bool) -> StandIn:
        if spec.rank == 1:
            raise OSError(11, "Resource temporarily unavailable")
        made.append(StandIn(100 + spec.rank))
        return made[-1]

    monkeypatch.setattr(ranks, "_start", start)
    with pytest.raises(ProcessError, match="rank 1 could not be started"):
        RankGroup([spec(0, 0), spec(1, 1)], entry="m:f", preloaded=False)
    assert [process.code for process in made] == [-9]


def test_a_process_already_gone_is_no_error() -> None:
    """It is what a signal is sent for."""

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    ranks._send(gone, 1, signal.SIGKILL)


@pytest.fixture
def polite(
    monkeypatch: pytest.MonkeyPatch, made: list[StandIn]
) -> tuple[list[tuple[object, int, int]], set[int]]:
    """The signals that were sent, as (function, pid, number), and the pids that leave when asked to."""
    signals: list[tuple[object, int, int]] = []
    obedient: set[int] = set()

    def send(function: object, pid: int, number: int) -> None:
        signals.append((function, pid, number))
        # a stopped process leaves once it is continued
        if number == signal.SIGKILL or (number == signal.SIGCONT and pid in obedient):
            for process in made:
                if process.pid == pid:
                    process.end(-number if number == signal.SIGKILL else 0)

    monkeypatch.setattr(ranks, "_send", send)
    monkeypatch.setattr(ranks, "members_by_session", lambda pids: {pid: [pid] for pid in pids})
    return signals, obedient


def test_ranks_are_asked_to_leave_before_they_are_killed(
    group: RankGroup, polite: tuple[list[tuple[object, int, int]], set[int]]
) -> None:
    """Their whole groups: SIGTERM, then SIGCONT, for a stopped rank could not hear it; SIGKILL last."""
    signals, obedient = polite
    obedient |= {104, 105, 106}
    group.kill(grace_seconds=20.0)
    for pid in (104, 105, 106):
        numbers = [number for function, to, number in signals if to == pid and function is os.killpg]
        assert numbers == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL]
    assert {exit.exit_code for exit in group.exits.values()} == {0}


def test_a_rank_that_does_not_leave_is_killed_after_the_grace(
    group: RankGroup, polite: tuple[list[tuple[object, int, int]], set[int]]
) -> None:
    """And only that one has ended by a signal."""
    _, obedient = polite
    obedient |= {104, 106}
    group.kill(grace_seconds=0.01)
    assert {place: exit.signal for place, exit in group.exits.items()} == {
        0: None,
        1: signal.SIGKILL,
        2: None,
    }


def test_without_grace_nobody_is_asked(
    group: RankGroup, polite: tuple[list[tuple[object, int, int]], set[int]]
) -> None:
    """SIGKILL at once."""
    signals, _ = polite
    group.kill()
    assert {number for _, _, number in signals} == {signal.SIGKILL}
    assert group.alive == {}


def test_what_a_rank_started_is_killed_with_it(
    group: RankGroup,
    made: list[StandIn],
    polite: tuple[list[tuple[object, int, int]], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child in a group of its own in the same session, also when its leader has left by itself."""
    asked: list[set[int]] = []

    def members(pids: object) -> dict[int, list[int]]:
        asked.append(set(pids))  # type: ignore[call-overload]
        return {104: [104, 2001], 105: [2002, 2003], 106: [106]}

    monkeypatch.setattr(ranks, "members_by_session", members)
    made[1].end(0)
    group.wait(5.0)
    group.kill()
    signals, _ = polite
    killed = {pid for function, pid, number in signals if function is os.kill and number == signal.SIGKILL}
    assert killed == {104, 106, 2001, 2002, 2003}
    assert asked == [{104, 105, 106}]
