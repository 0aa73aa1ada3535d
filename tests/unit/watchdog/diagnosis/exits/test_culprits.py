"""The rank that failed first is the culprit, and no rank that only lost its peer."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.failed_ranks import PEER_GONE, diagnose, make_error, make_exit, peer_error
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import diagnose_early_exit
from grpo_run.watchdog.observation import Exit, ProcessEnd, RankError


def test_a_killed_rank_is_the_culprit_not_its_peers() -> None:
    """Victims may be observed first; the kill is still the cause."""
    exits = [
        make_exit(0, order=0, error=peer_error()),
        make_exit(2, order=1, error=peer_error()),
        make_exit(1, order=2, signal=signal.SIGKILL),
    ]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprits) == (Cause.signal, (1,))
    assert verdict.waiters == (0, 2)
    assert verdict.sentence == "Rank 1 was killed by SIGKILL in step 8 (phase generate)."
    assert not verdict.deterministic


@pytest.mark.parametrize(
    ("end", "how", "advised"),
    [
        (ProcessEnd(exit_code=None, signal=signal.SIGKILL), "was killed by SIGKILL", True),
        (ProcessEnd(exit_code=3, signal=None), "exited with code 3", False),
    ],
)
def test_ranks_that_died_with_their_forkserver_are_not_culprits(
    end: ProcessEnd, how: str, advised: bool
) -> None:
    """Nothing that the ranks did; a rank that lost its peer first does not hide it."""
    exits = [
        make_exit(2, order=0, error=peer_error()),
        replace(make_exit(0, order=1, signal=signal.SIGKILL), forkserver=end),
        replace(make_exit(1, order=2, signal=signal.SIGKILL), forkserver=end),
    ]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprits, verdict.deterministic) == (Cause.signal, (), False)
    assert verdict.sentence == (
        f"The forkserver, which starts the ranks, {how} in step 8 (phase generate); ranks 0 and 1 died"
        " with it."
    )
    assert bool(verdict.advice) is advised


def test_an_exception_of_its_own_is_the_cause_not_the_connection_errors() -> None:
    """Even if a victim's error was recorded a moment earlier."""
    exits = [
        make_exit(0, order=0, error=peer_error(wall_time=999.0)),
        make_exit(1, order=1, error=make_error(wall_time=1000.0)),
    ]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 1)
    assert verdict.deterministic


def test_an_abort_that_follows_an_exception_is_a_victim() -> None:
    """NCCL's watchdog aborts the peers of a rank that raised; the exception is the cause."""
    exits = [make_exit(1, order=0, error=make_error()), make_exit(0, order=1, signal=signal.SIGABRT)]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 1)


def test_no_rank_is_blamed_if_all_are_victims() -> None:
    """The cause is on another node: unknown, without a culprit."""
    exits = [
        make_exit(rank, order=rank, error=peer_error(traceback=f"traceback of rank {rank}"))
        for rank in range(2)
    ]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprits, verdict.culprit) == (Cause.unknown, (), None)
    assert verdict.confidence == "unknown"
    assert not verdict.deterministic
    assert verdict.traceback == "traceback of rank 0", "that of the first rank seen"


@given(
    order=st.permutations(range(4)),
    killed=st.integers(0, 3),
    times=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
)
def test_the_culprit_does_not_depend_on_the_order_of_the_list(
    order: list[int], killed: int, times: list[float]
) -> None:
    """The killed rank is the culprit for any order of the exits."""
    exits = [
        Exit(
            rank=rank, pid=rank + 1, order=order.index(rank),
            exit_code=None if rank == killed else 1, signal=signal.SIGKILL if rank == killed else None,
            error=None if rank == killed else RankError(
                type="RuntimeError", message=PEER_GONE, traceback="", location=None, wall_time=times[rank]
            ),
        )
        for rank in order
    ]  # fmt: skip
    verdict = diagnose(*exits, slots=dict.fromkeys(range(4)), best_position=(1, 1))
    assert verdict.culprits == (killed,)
    assert set(verdict.waiters) == set(range(4)) - {killed}


def test_a_verdict_names_the_rank_that_left_and_its_phase() -> None:
    """One rank is named in the singular, and the phase is the one it left in."""
    left, failed = [make_exit(1, exit_code=0)], [make_exit(0, error=peer_error())]
    verdict = diagnose_early_exit(left, failed, {0: make_slot(0), 1: make_slot(1)})
    assert verdict.sentence.startswith("Rank 1 ")
    assert verdict.phase == "generate"


def raised(rank: int, at: float = 1000.0) -> Exit:
    """A rank that has raised an exception of its own."""
    return make_exit(rank, error=make_error(wall_time=at))


def killed(rank: int, number: int = signal.SIGKILL) -> Exit:
    """A rank that was ended by a signal."""
    return make_exit(rank, signal=number)


@pytest.mark.parametrize(
    ("why", "exits", "culprit"),
    [
        ("the time of exceptions counts, not the order of exits", [raised(0, 1.5), raised(1, 1.25)], 1),
        ("an exit with a code only may follow another's exception", [make_exit(0), raised(1)], 1),
        ("an exception after the first kill moves no blame", [killed(2), raised(1), killed(0)], 2),
        ("also when another rank raised after the kill", [raised(2), killed(1), raised(0, 1001.0)], 2),
        ("the kill and the exit followed", [raised(0), killed(1, signal.SIGABRT), make_exit(2)], 0),
        ("a library may have ended a rank because its peer was killed", [make_exit(0), killed(1)], 1),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_blamed(why: str, exits: list[Exit], culprit: int) -> None:
    """Whatever was seen first, as the exits are listed."""
    seen = [replace(exit, order=order) for order, exit in enumerate(exits)]
    assert diagnose(*seen).culprit == culprit, why
