"""Ranks that vote through the board: a rank that waits for a vote is seen, and deadlocks in votes are proved.

Torch's records do not have these votes; the ranks are threads with real votes on a real board.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.collective_log import is_blocked
from grpo_run.runtime.board.exchange import Message
from grpo_run.runtime.rank.collective_recorder import Integers, OwnLog, Recorder
from grpo_run.runtime.rank.transport import SharedMemoryTransport
from grpo_run.runtime.rank.vote import Vote, VoteGroup
from grpo_run.runtime.rank.worker_server import report_threads
from grpo_run.runtime.supervisor.detection._collective_records import CollectiveRecords
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove

SECONDS = 20.0


class Ranks:
    """Two ranks of one node: their boards, recorders and vote groups."""

    def __init__(self, path: Path, timeout_seconds: float = 1800.0) -> None:
        self.path = path
        self.board = Board.create(path, 2)
        self.timeout_seconds = timeout_seconds
        self.recorders = []
        self.groups: list[VoteGroup] = []
        for rank in (0, 1):
            own = Board.open(path, writable=True)
            self.recorders.append(Recorder(own.writer(rank, rank=rank, pid=100 + rank, attempt=0)))
            self.groups.append(self.connect(rank, own))
        self.local = LocalRanks(
            board=self.board, local_ranks={0: 0, 1: 1}, pids={0: 100, 1: 101}, sockets={}, world_size=2
        )
        self.records = CollectiveRecords(self.local, time.monotonic)
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def connect(self, rank: int, board: Board, channel: str = "grpo_run/vote") -> VoteGroup:
        """Connect another group of a rank."""
        return VoteGroup(
            SharedMemoryTransport(
                board.exchange(rank, attempt=0, channel=channel),
                name=channel,
                rank=rank,
                timeout_seconds=self.timeout_seconds,
                recorder=self.recorders[rank],
            )
        )

    def run(self, target: Callable[[], object]) -> threading.Thread:
        """Run a rank's call in a thread."""

        def guarded() -> None:
            try:
                target()
            except RuntimeError as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread

    def wait_until_blocked(self, *ranks: int) -> None:
        """Wait until these ranks are seen to be blocked in a collective."""
        deadline = time.monotonic() + SECONDS
        while not all(is_blocked(self.board.copy_log(rank)) for rank in ranks):
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.005)

    def end(self) -> None:
        """End every wait: each rank skips a message, which is an error for whoever waits for it."""
        for rank in (0, 1):
            exchange = Board.open(self.path, writable=True).exchange(rank, attempt=0, channel="grpo_run/vote")
            assert exchange is not None
            exchange.send(exchange.last(rank) + 2, Message(0, b""))
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def positions(
        self, *, exited: tuple[int, ...] = (), recorded: tuple[Collective, ...] = ()
    ) -> dict[int, Position]:
        """Where the ranks are; each of their threads is assumed to wait in a collective."""
        found = {}
        for rank in (0, 1):
            position = self.records.position(rank, self.board.read(rank), recorded, exited=rank in exited)
            found[rank] = position if rank in exited else without_other_threads(position)
        return found

    def proved(self, **arguments: tuple[int, ...]) -> Deadlock | None:
        """What the positions prove."""
        return prove(self.positions(**arguments), world_size=2)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Two ranks; threads that still wait get an error at the end."""
    made = Ranks(tmp_path / "board.mmap")
    yield made
    made.end()


def test_a_rank_that_waits_for_a_vote_is_blocked_until_the_peer_votes(ranks: Ranks) -> None:
    """Its entry names the members; the peer that is merely late proves nothing."""
    zero, one = ranks.groups
    thread = ranks.run(lambda: zero.maximum(1))
    ranks.wait_until_blocked(0)
    (entry,) = ranks.board.collective_log(0)
    assert (entry.group, entry.sequence, entry.operation) == ("grpo_run/vote", 1, "all_reduce")
    assert (entry.members, entry.sizes, entry.dtypes) == ((0, 1), ((1,),), ("Long",))
    assert (entry.progress, entry.in_memory) == (CollectiveProgress.waiting, True)
    assert entry.thread == str(thread.ident)
    assert ranks.proved() is None
    assert one.maximum(2) == 2
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not is_blocked(ranks.board.copy_log(0))
    assert [ranks.board.collective_log(rank)[0].completed for rank in (0, 1)] == [True, True]


def test_a_vote_that_is_not_waited_for_blocks_nobody(ranks: Ranks) -> None:
    """It overlaps with the step. If it is found complete, its rank never counts as waiting."""
    zero, one = ranks.groups
    zero.start(Vote(step=1))
    assert ranks.board.collective_log(0)[0].progress is CollectiveProgress.enqueued
    assert not is_blocked(ranks.board.copy_log(0))
    one.start(Vote(step=1))
    one.collect()
    zero.collect()
    assert ranks.board.collective_log(0)[0].completed


def test_a_wait_for_a_rank_that_has_exited_is_proved(ranks: Ranks) -> None:
    """Nobody else notices it: there is no connection that breaks."""
    zero, one = ranks.groups
    ranks.run(lambda: zero.maximum(1))
    one.maximum(1)
    ranks.threads[0].join(SECONDS)
    ranks.run(lambda: zero.maximum(2))
    ranks.wait_until_blocked(0)
    assert ranks.proved() is None
    found = ranks.proved(exited=(1,))
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))


def test_a_rank_whose_log_no_longer_has_the_group_counts_by_the_board(ranks: Ranks) -> None:
    """It has exited after hundreds of other collectives, so that only the board knows its last vote."""
    zero, one = ranks.groups
    thread = ranks.run(lambda: zero.maximum(1))
    one.maximum(1)
    thread.join(SECONDS)
    other = OwnLog(ranks.recorders[1], "another", world_size=2)
    for sequence in range(1, 300):
        other.completed(other.issued(sequence, "allreduce", Integers((1,))))
    ranks.run(lambda: zero.maximum(2))
    ranks.wait_until_blocked(0)
    positions = ranks.positions(exited=(1,))
    assert positions[1].issued == {"grpo_run/vote": 1}
    assert ranks.proved(exited=(1,)) is not None


def test_a_collective_of_the_script_without_a_record_still_makes_a_rank_unknown(ranks: Ranks) -> None:
    """Torch's recorder has nothing of it, so it may lack others too; votes alone are complete on the
    board.
    """
    zero, _ = ranks.groups
    zero.start(Vote(step=1))
    assert ranks.positions()[0].records is not None
    OwnLog(ranks.recorders[0], "0", world_size=2).issued(1, "allreduce", Shape(), Handle())
    assert ranks.positions()[0].records is None


def test_a_thread_in_a_vote_is_reported_as_waiting(ranks: Ranks) -> None:
    """With a number of context switches that does not change while it waits."""
    thread = ranks.run(lambda: ranks.groups[0].maximum(1))
    ranks.wait_until_blocked(0)
    ident = str(thread.ident)
    deadline, first, again = time.monotonic() + SECONDS, None, -1
    while first != again:
        assert time.monotonic() < deadline
        first = report_threads(ranks.recorders[0]).waiting.get(ident)
        time.sleep(0.1)
        again = (found := report_threads(ranks.recorders[0])).waiting.get(ident, -1)
    assert again > 0
    assert found.issued == {"grpo_run/vote": 1}
    ranks.groups[1].maximum(1)
    thread.join(SECONDS)
    assert ident not in report_threads(ranks.recorders[0]).waiting


class Shape:
    """Stands for a tensor."""

    shape = (1,)
    dtype = "torch.float32"


class Handle:
    """Stands for torch's handle."""
