"""Flight Recorders are read when a deadlock is possible, and rarely while ranks are only late."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from support.builders.runtime.detector_world import World, hang_in
from support.collective_entries import add_entry

from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def test_recorders_are_fetched_only_when_a_phase_is_overdue(world: World) -> None:
    """The first check assumes that every rank works and fetches nothing; then all recorders are fetched."""
    for rank in (0, 1):
        world.writers[rank].replace(Phase.reward)
    assert world.advance(19.5) is None
    assert world.polls == []
    found = world.advance(2.0)
    assert found is not None
    assert len(world.polls) == 2
    assert min(world.polls) >= 1020.0


def test_poll_intervals_grow_during_a_long_phase(make: Callable[..., World]) -> None:
    """300 scans in 30 s cause at most a dozen polls, at growing intervals."""
    world = make(settings=DeadlineSettings())
    add_entry(world.writers[0].collective_log, progress=CollectiveProgress.waiting)
    world.writers[1].replace(Phase.generate)
    assert world.advance(30.0) is None
    assert 4 <= len(world.polls) <= 12
    gaps = [after - before for before, after in itertools.pairwise(world.polls)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 5.2


def test_no_rank_is_polled_while_none_is_in_a_collective(world: World) -> None:
    """The duration of the standstill does not matter."""
    for rank in (0, 1):
        note = world.issue(rank, "all_reduce")
        world.complete(rank, note)
        world.writers[rank].replace(Phase.generate)
    assert world.advance(15.0) is None
    assert world.polls == []


def test_no_rank_is_polled_while_all_but_one_move(make: Callable[..., World]) -> None:
    """A single rank that waits for running ranks is at most late."""
    world = make(3)
    world.issue(0, "all_reduce")

    def work() -> None:
        for writer in world.writers[1:]:
            writer.record_work()

    assert world.advance(30.0, doing=work) is None
    assert world.polls == []


def test_a_newly_blocked_rank_is_polled_at_once(make: Callable[..., World]) -> None:
    """Even if polls had become rare: it may complete a deadlock."""
    world = make(3, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    world.issue(1, "all_reduce")
    assert world.advance(20.0, doing=world.writers[2].record_work) is None
    rare = len(world.polls)
    world.issue(2, "all_gather", line=91)
    began = world.now
    world.deadlocks(1.0)
    assert world.now - began < 0.6
    assert len(world.polls) == rare + 2


def test_gradient_reductions_of_ddp_are_observed(world: World) -> None:
    """C++ issues them: no log entry says that the rank waits, only its phase says that it may."""
    for rank, operation in ((0, "all_reduce"), (1, "all_gather")):
        world.begin_backward(rank)
        world.issue(rank, operation, noted=False)
    world.deadlocks(1.0)


def test_ranks_that_wait_in_different_groups_during_their_forward_pass_are_found(world: World) -> None:
    """The body of a hand-written loop is such a phase; the main threads wait in Python, and in no backward
    pass.
    """
    for rank, group in ((0, "0"), (1, "1")):
        world.writers[rank].replace(Phase.forward_backward)
        for other in ("0", "1"):
            world.issue(rank, "all_reduce", progress=CollectiveProgress.completed, group=other)
        world.issue(rank, "all_reduce", group=group)
    world.deadlocks(1.0)


def test_the_records_of_ranks_that_compute_in_their_backward_are_not_read(world: World) -> None:
    """Most ranks are there most of the time, and eight records take a tenth of a second of CPU time."""
    for rank in (0, 1):
        world.begin_backward(rank)
        world.process_state[rank] = "R"
    assert world.advance(10.0) is None
    assert world.polls == []
    world.issue(0, "all_reduce", progress=CollectiveProgress.enqueued, noted=False)
    world.issue(1, "all_gather", progress=CollectiveProgress.enqueued, noted=False)
    world.process_state = {0: "S", 1: "S"}
    assert world.advance(1.0) is not None


def test_the_records_are_read_late_while_ranks_wait_for_one_that_is_at_work(
    make: Callable[..., World],
) -> None:
    """Every step of a training has such a wait."""
    world = make(3)
    for rank in (0, 1):
        world.issue(rank, "all_reduce")
    world.writers[2].replace(Phase.reward)
    assert world.advance(1.9) is None
    assert world.polls == []
    assert world.advance(0.3) is None
    assert world.polls != []


@pytest.mark.parametrize(("operation", "reads_at"), [("all_reduce", 2.0), ("all_gather", 0.3)])
def test_the_records_of_collectives_on_devices_are_read_late_if_the_logs_agree(
    make: Callable[..., World], operation: str, reads_at: float
) -> None:
    """Nobody waits for a collective on a device, so every rank may be in its last one at any time."""
    world = make(2)
    for rank, name in ((0, "all_reduce"), (1, operation)):
        world.writers[rank].replace(Phase.generate)
        add_entry(
            world.writers[rank].collective_log, sequence=5, operation=name, sizes="3", dtypes="Float",
            progress=CollectiveProgress.enqueued, on_device=True,
        )  # fmt: skip
    assert world.advance(3.0) is None
    assert world.polls[0] == pytest.approx(1000.0 + reads_at, abs=0.25)


@pytest.mark.parametrize("defect", ["other operation", "other group", "passed by", "two threads", "exited"])
def test_the_records_are_read_at_once_if_more_than_a_late_rank_is_seen(
    make: Callable[..., World], defect: str
) -> None:
    """Another rank is at work, so the logs decide whether the others may be deadlocked."""
    world = make(3)
    world.writers[2].replace(Phase.reward)
    world.issue(0, "all_reduce")
    world.issue(1, "all_gather" if defect == "other operation" else "all_reduce",
    group="1" if defect == "other group" else "0")  # fmt: skip
    if defect == "passed by":
        world.issue(2, "all_gather", progress=CollectiveProgress.enqueued)
    if defect == "two threads":
        world.issue(1, "all_reduce", group="1")
    if defect == "exited":
        world.watch.rank_exited(2)
    world.advance(0.55)
    assert world.polls != []


@pytest.mark.parametrize("state", ["R", "D", "T"])
def test_a_runnable_thread_is_not_idle_in_its_backward(world: World, state: str) -> None:
    """It uses no CPU time because other processes occupy the processor or a disk is slow.

    One poll asleep is not enough. A rank that is seen running is not polled.
    """
    scans = itertools.count()
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    for rank, group in ((0, "1"), (1, "2")):
        world.begin_backward(rank, group)
        world.issue(rank, "all_reduce", progress=CollectiveProgress.enqueued, noted=False, group=group)

    def flicker() -> None:
        turn = next(scans) if state == "R" else len(world.polls)
        for rank in (0, 1):
            world.process_state[rank] = state if turn % 2 else "S"

    assert world.advance(8.0, doing=flicker) is None
    assert len(world.polls) > 2
    world.process_state = {0: "S", 1: "S"}  # polls have grown rare, and two of them have to see it
    world.deadlocks(11.0)


def test_a_rank_that_moves_now_and_then_does_not_make_polls_frequent(make: Callable[..., World]) -> None:
    """The ranks that wait for it keep their poll interval."""
    world = make(2, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    looks = itertools.count()

    def sometimes() -> None:
        if next(looks) % 6 == 0:
            world.writers[1].record_work()

    assert world.advance(30.0, doing=sometimes) is None
    assert world.polls
    assert len(world.polls) <= 16


@pytest.mark.parametrize("phase", [Phase.vote, Phase.score, Phase.generate])
def test_a_wait_in_an_older_entry_is_seen(world: World, phase: Phase) -> None:
    """The rank issued another collective asynchronously before it waited for this one.

    No other rank waits.
    """
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.issue(0, "all_gather", progress=CollectiveProgress.enqueued)
    world.issue(1, "all_gather", progress=CollectiveProgress.enqueued)
    world.writers[0].replace(phase)
    world.deadlocks(2.0)


def test_a_rank_that_exits_is_polled_at_once(make: Callable[..., World]) -> None:
    """Even if polls had become rare while it was late."""
    world = make(2, settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    assert world.advance(21.0) is None
    world.watch.rank_exited(1)
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    left = world.now
    assert world.deadlocks(10.0).culprits == (1,)
    assert world.now - left < 1.5
