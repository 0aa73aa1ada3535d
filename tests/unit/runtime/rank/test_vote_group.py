"""The vote group: votes, collective decisions, and the order they require."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from support.vote_groups import run_ranks

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import ConsensusError
from grpo_run.runtime.rank.collective_recorder import Recorder
from grpo_run.runtime.rank.gloo_transport import GlooTransport
from grpo_run.runtime.rank.transport import SharedMemoryTransport, Transport
from grpo_run.runtime.rank.vote import Flags, Vote, VoteGroup, VoteResult

Connect = Callable[[], Transport]


@pytest.fixture
def alone() -> VoteGroup:
    """A group of one rank, without a transport."""
    return VoteGroup()


def test_a_single_rank_decides_without_a_transport(alone: VoteGroup) -> None:
    """Its own vote and values are the result. There is no vote before the first and after each collected one.
    The bootstrap and an exit handler may both close the group.
    """
    assert alone.collect() is None
    alone.start(Vote(step=3, flags=Flags(save=True)))
    assert alone.collect() == VoteResult(step=3, flags=Flags(save=True))
    assert alone.collect() is None
    assert alone.votes == 1
    assert alone.gather([1, 2**62]) == [[1, 2**62]]
    assert alone.maxima([3, 0, 2**40]) == [3, 0, 2**40]
    assert [alone.maximum(value) for value in (-1, 0, 2**40)] == [-1, 0, 2**40]
    alone.close()
    alone.close()


def test_another_collective_during_a_vote_is_a_bug(alone: VoteGroup) -> None:
    """The result of the vote would be lost, or ranks could issue the two in different orders."""
    alone.start(Vote(step=1))
    with pytest.raises(AssertionError, match="in progress"):
        alone.start(Vote(step=2))
    with pytest.raises(AssertionError, match="collect the vote first"):
        alone.maximum(1)


def transports(kind: str, ranks: int, tmp_path: Path, timeout_seconds: float = 30.0) -> list[Connect]:
    """For each rank, a function that connects its transport, to be called in the rank's thread."""
    board = Board.create(tmp_path / "board.mmap", ranks)
    store = dist.HashStore()
    connected = []
    for rank in range(ranks):
        recorder = Recorder(board.writer(rank, rank=rank, pid=rank, attempt=0))
        common = {
            "name": "grpo_run/vote",
            "rank": rank,
            "timeout_seconds": timeout_seconds,
            "recorder": recorder,
        }
        if kind == "memory":
            exchange = board.exchange(rank, attempt=0, channel="grpo_run/vote")
            assert exchange is not None
            connect: Connect = functools.partial(SharedMemoryTransport, exchange, **common)
        else:
            connect = functools.partial(GlooTransport, store, world_size=ranks, **common)
        connected.append(connect)
    return connected


@pytest.mark.parametrize("kind", ["memory", "gloo"])
def test_ranks_decide_alike_on_every_transport(kind: str, tmp_path: Path) -> None:
    """Votes, maxima and gathered rows of three ranks, many in a row; also more values than one message
    holds.
    """
    ranks, rounds = 3, 20

    def run(rank: int, connect: Connect) -> list[object]:
        group, seen = VoteGroup(connect()), list[object]()
        for step in range(1, rounds + 1):
            group.start(Vote(step=step, flags=Flags(save=rank == step % ranks)))
            seen.append(group.collect())
            seen.append(group.maxima([rank, -rank, 2**40 + step]))
            seen.append(group.gather([rank, step, -(2**62)]))
        seen.append(group.gather(list(range(rank, rank + 1500))))
        seen.append((group.votes, group.wait_seconds > 0))
        group.close()
        return seen

    results = run_ranks(
        *[functools.partial(run, rank, one) for rank, one in enumerate(transports(kind, ranks, tmp_path))]
    )
    assert results[0] == results[1] == results[2]
    votes, maxima, rows = results[0][:3]
    assert (votes.step, votes.flags) == (1, Flags(save=True))
    assert (maxima, rows) == ([2, 0, 2**40 + 1], [[rank, 1, -(2**62)] for rank in range(3)])
    assert results[0][-2] == [list(range(rank, rank + 1500)) for rank in range(3)]


@pytest.mark.parametrize("kind", ["memory", "gloo"])
def test_ranks_on_different_steps_all_get_the_error(kind: str, tmp_path: Path) -> None:
    """Every rank raises; otherwise some would go on."""

    def run(rank: int, connect: Connect) -> str:
        group = VoteGroup(connect())
        group.start(Vote(step=7 + rank))
        with pytest.raises(ConsensusError) as caught:
            group.collect()
        group.maximum(0)  # Gloo fails if a peer leaves before
        return str(caught.value)

    first, second = run_ranks(
        *[functools.partial(run, rank, one) for rank, one in enumerate(transports(kind, 2, tmp_path))]
    )
    assert first == second
    assert "the lowest is 7, the highest 8" in first


@pytest.mark.parametrize("kind", ["memory", "gloo"])
def test_a_vote_without_a_peer_times_out(kind: str, tmp_path: Path) -> None:
    """A peer that has died sends nothing more: the wait ends after the time limit, with the same type of
    error.
    """
    reached = threading.Event()

    def wait(connect: Connect) -> float:
        group = VoteGroup(connect())
        group.maximum(1)
        group.start(Vote(step=1))
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            group.collect()
        reached.set()
        return time.monotonic() - began

    def leave(connect: Connect) -> None:
        group = VoteGroup(connect())
        group.maximum(2)
        assert reached.wait(30)

    here, there = transports(kind, 2, tmp_path, timeout_seconds=0.5)
    waited, _ = run_ranks(functools.partial(wait, here), functools.partial(leave, there))
    assert waited >= 0.4


def test_a_process_forked_from_a_rank_does_not_vote(tmp_path: Path) -> None:
    """Its vote would count as the rank's."""
    connect, _ = transports("memory", 2, tmp_path)
    group = VoteGroup(connect())
    group.detach()
    with pytest.raises(RuntimeError, match="forked from a rank"):
        group.start(Vote(step=1))


def test_what_was_proved_is_raised_by_a_rank_that_waits(tmp_path: Path) -> None:
    """The rank that it waits for never comes; the supervisor has seen where that one is."""
    connect, _ = transports("memory", 2, tmp_path)
    board = Board.open(tmp_path / "board.mmap", writable=True)
    timer = threading.Timer(0.2, board.publish_disagreement, ["Deadlock: rank 1 is in barrier."])
    timer.start()
    with pytest.raises(ConsensusError, match="rank 1 is in barrier"):
        VoteGroup(connect()).gather([1])
    timer.join()
