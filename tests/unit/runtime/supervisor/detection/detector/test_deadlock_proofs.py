"""A deadlock is proved by two equal polls, within a second, and not while any thread may still act."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from support.builders.runtime.detector_world import World, hang_in, mismatch, move_to_nccl

from grpo_run.runtime.supervisor.detection._collective_records import MAX_UNANSWERED
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def test_a_mismatch_is_found_within_a_second(world: World) -> None:
    """The finding has both ranks' lines and the time at which the second rank was blocked."""
    mismatch(world)
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.stall is None
    assert found.deadlock.cause is Cause.collective_mismatch
    assert {rank: place.line for rank, place in found.deadlock.locations.items()} == {0: 88, 1: 91}
    assert 1000.0 <= found.began_at_seconds <= 1000.1 + 1e-6
    assert set(world.watch.recordings) == {0, 1}


def test_a_mismatch_in_nccls_own_recorder_is_found(world: World) -> None:
    """On a GPU the other recorder has none of it. The evidence has both."""
    mismatch(world)
    move_to_nccl(world)
    deadlock = world.deadlocks(1.0)
    assert deadlock.cause is Cause.collective_mismatch
    assert all(b"nccl:" in text and b"gloo:" in text for text in world.watch.recordings.values())


def test_a_build_without_nccl_is_asked_for_its_recorder_once(world: World) -> None:
    mismatch(world)
    world.deadlocks(1.0)
    assert len(world.polls) > 1
    assert world.asked_nccl == [{0, 1}]


def test_rare_scans_prove_a_mismatch_as_soon_as_frequent_ones(world: World) -> None:
    """The detector asks for the scans that it needs: 0.3 s after the last change, and 0.1 s later."""
    world.scan()
    mismatch(world)
    found, scans = None, 0
    while found is None and scans < 10:
        world.now = min(world.now + 0.2, max(world.now, world.watch.due_at))
        found, scans = world.scan(), scans + 1
    assert found is not None
    assert world.now == pytest.approx(1000.4)
    assert scans == 3


def test_ranks_that_move_or_wait_for_no_other_rank_need_no_further_scan(world: World) -> None:
    """Otherwise a healthy run would be scanned more often than a deadlock needs."""
    assert world.advance(1.0, doing=world.writers[0].record_work) is None
    assert world.watch.due_at == math.inf
    world.issue(0, "all_reduce")
    world.scan()
    assert world.watch.due_at == pytest.approx(world.now + 0.3)
    world.writers[0].record_work()
    world.writers[1].record_work()
    world.now += 0.2
    world.scan()
    assert world.watch.due_at >= world.now + 0.25


def test_a_deadlock_needs_two_polls(world: World) -> None:
    """The first poll only raises a suspicion."""
    mismatch(world)
    while not world.polls:
        world.now += 0.1
        assert world.scan() is None
    assert world.watch.suspicion is not None
    assert world.advance(1.0) is not None
    assert len(world.polls) == 2


def test_recorders_that_changed_between_two_polls_prove_nothing(world: World) -> None:
    """The Flight Recorders changed although no slot did."""
    mismatch(world)

    def another() -> None:
        for rank in (0, 1):
            world.entries[rank].insert(
                0, {**world.entries[rank][0], "collective_seq_id": 1, "process_group": ["2", ""], "pg_id": 2}
            )

    assert world.advance(5.0, doing=another) is None
    assert len(world.polls) > 2
    assert world.advance(6.0) is not None


def test_a_slot_that_changes_between_two_polls_restarts_them(world: World) -> None:
    """A rank that runs is not deadlocked, whatever its last log entry is."""
    mismatch(world)
    assert world.advance(30.0, doing=world.writers[1].record_work) is None
    assert world.polls == []
    assert world.watch.suspicion is None


def test_an_unconfirmed_suspicion_is_withdrawn(world: World) -> None:
    """The rank was only slow to enter its next phase."""
    mismatch(world)
    while not world.polls:
        world.advance(0.1)
    assert world.watch.suspicion is not None
    world.writers[0].enter(Phase.optimizer)
    world.writers[1].enter(Phase.optimizer)
    assert world.scan() is None
    assert world.watch.suspicion is None


def test_a_circular_wait_is_found(world: World) -> None:
    """Two ranks issue collectives of two groups in opposite order."""
    circle(world)
    assert world.deadlocks(1.0).cause is Cause.collective_missing_rank


def circle(world: World) -> None:
    """Each rank waits in a group in which the other has not arrived."""
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    world.issue(0, "all_reduce", group="1")
    world.issue(1, "all_reduce", group="2")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_thread_that_may_act_prevents_the_proof_of_a_circle(world: World, rank: int) -> None:
    """It may join the group that the other rank waits in. Once it has ended, the circle is proved."""
    circle(world)
    world.active[rank] = ["Thread-1 at serve.py:12 serve"]
    assert world.advance(3.0) is None
    assert world.asked
    assert world.watch.suspicion is None
    world.active.clear()
    assert world.advance(10.0) is not None


def test_threads_are_asked_for_only_if_the_records_prove_a_deadlock(world: World) -> None:
    """A late rank is no reason to interrupt any interpreter."""
    hang_in(world, Phase.reward)
    assert world.advance(3.0) is None
    assert world.polls
    assert world.asked == []


def test_a_thread_that_ran_between_two_polls_prevents_a_proof(world: World) -> None:
    """It slept at both, and its context switches say that it has run."""
    circle(world)

    def run() -> None:
        world.switches[1] += 1

    assert world.advance(5.0, doing=run) is None
    assert len(world.asked) > 1
    assert world.advance(10.0) is not None


def test_an_interpreter_that_does_not_run_proves_no_circle_and_is_asked_three_times(
    make: Callable[..., World],
) -> None:
    """Each request occupies a thread of its worker server, which also serves the Flight Recorder."""
    world = make(settings=DeadlineSettings())
    circle(world)
    world.frozen = {1}
    assert world.advance(30.0) is None
    assert [asked for asked in world.asked if 1 in asked] == [{0, 1}] * MAX_UNANSWERED
    assert len(world.asked) > MAX_UNANSWERED


def test_a_rank_that_exited_is_named_as_the_missing_one(world: World) -> None:
    """Its process exited with code 0; its collective log outlives it."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    world.watch.rank_exited(1)
    deadlock = world.deadlocks(1.0)
    assert (deadlock.cause, deadlock.culprits) == (Cause.rank_exited_early, (1,))


def test_a_rank_past_its_last_line_may_still_join_collectives(world: World) -> None:
    """Its threads and exit handlers may do so until the process has exited."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    assert world.advance(3.5) is None
    assert world.polls
    world.watch.rank_exited(1)
    assert world.deadlocks(6.0).culprits == (1,)


def test_a_single_rank_of_a_node_is_never_proved_wrong(make: Callable[..., World]) -> None:
    """The ranks that it waits for run on other nodes and may only be late."""
    world = make(1, world_size=2)
    world.issue(0, "all_reduce")
    assert world.advance(300.0, every=0.5) is None
    assert world.polls
