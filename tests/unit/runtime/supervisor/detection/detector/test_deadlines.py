"""A rank is overdue when its phase has outlived its deadline, unless it works or waits for another rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.builders.runtime.detector_world import World, hang_in, suspect_a_stall

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations

# lateness


@pytest.mark.parametrize("phase", [Phase.generate, Phase.reward, Phase.data, Phase.eval])
def test_a_late_rank_that_works_is_not_reported(world: World, phase: Phase) -> None:
    """It works while the other rank waits in a collective."""
    hang_in(world, phase)
    assert world.advance(1200.0, every=2.0, doing=world.writers[1].record_work) is None
    assert world.watch.suspicion is None


def test_a_late_idle_rank_is_not_reported_before_its_deadline(world: World) -> None:
    """Polls continue and prove nothing."""
    hang_in(world, Phase.reward)
    assert world.advance(19.5) is None
    assert len(world.polls) > 2
    found = world.advance(2.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.waiters, found.stall.phase) == ((1,), (0,), Phase.reward)
    assert found.began_at_seconds == pytest.approx(1000.0)


def test_a_missed_deadline_is_confirmed_by_a_second_check(world: World) -> None:
    """A single check may see a rank between two phases."""
    suspect_a_stall(world)
    assert world.advance(0.1) is not None


# deadlines


def test_a_rank_that_works_slowly_is_not_overdue(world: World) -> None:
    """Each forward pass restarts the clock."""
    for writer in world.writers:
        writer.replace(Phase.generate)
    ticks = iter(range(10**6))

    def sometimes() -> None:
        if next(ticks) % 20 == 0:
            for writer in world.writers:
                writer.record_work()

    assert world.advance(200.0, every=0.5, doing=sometimes) is None


def test_a_suspected_stall_that_continues_is_cleared(world: World) -> None:
    """All ranks have entered another phase and are within their deadlines."""
    suspect_a_stall(world)
    for writer in world.writers:
        writer.replace(Phase.optimizer)
    assert world.advance(1.0) is None
    assert world.watch.suspicion is None


@pytest.mark.parametrize("silent", [{}, {0: "connection refused"}])
def test_a_rank_that_waits_in_its_backward_for_a_late_rank_is_not_blamed(
    world: World, silent: dict[int, str]
) -> None:
    """It exceeds its deadline because of the other rank, which works.

    Its recorder may or may not answer.
    """
    world.watch.phase_durations.earlier_attempts = {Phase.forward_backward: Durations.of([1.0] + [0.2] * 100)}
    for _ in range(2):  # its first of the attempt is over
        world.writers[0].replace(Phase.forward_backward)
    world.issue(0, "all_reduce", noted=False)
    world.silent = silent
    world.writers[1].replace(Phase.data)
    assert world.advance(600.0, every=0.5, doing=world.writers[1].record_work) is None
    assert world.watch.suspicion is None


def test_a_rank_that_waits_for_an_older_collective_is_not_blamed(world: World) -> None:
    """Its last log entry is an asynchronous collective."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.issue(0, "all_reduce", progress=CollectiveProgress.enqueued)
    world.writers[0].replace(Phase.generate)
    world.writers[1].replace(Phase.reward)
    assert world.advance(300.0, every=0.5, doing=world.writers[1].record_work) is None


def test_a_script_that_never_starts_training_is_found(world: World) -> None:
    """It has no open phase: start-up has its own deadline."""
    for writer in world.writers:
        writer.state = RankState.starting
        writer.leave(Phase.data)
        writer.publish()
    assert all(slot is not None and slot.phases == () for slot in world.slots().values())
    stall = world.stalls(60.0, every=0.5)
    assert (stall.phase, stall.culprits) == (Phase.startup, (0, 1))


def test_a_script_that_hangs_between_two_calls_is_found(world: World) -> None:
    """At the ceiling, because nothing can be learned about the script's own time."""
    for writer in world.writers:
        writer.state = RankState.between
        writer.replace(Phase.idle)
    assert world.advance(39.0, every=0.5) is None
    assert world.stalls(21.0, every=0.5).phase is Phase.idle


def test_a_checkpoint_that_still_writes_is_not_overdue(world: World) -> None:
    """Bytes count as progress in phases that move bytes, and in no others."""
    hang_in(world, Phase.checkpoint)

    def write() -> None:
        world.io[1] = (world.io[1] or 0) + 64 * 1024

    assert world.advance(100.0, every=0.5, doing=write) is None
    assert world.stalls(25.0, every=0.5).cause is Cause.checkpoint_stall
    world.begin(1)
    hang_in(world, Phase.reward)
    assert world.advance(25.0, every=0.5, doing=write) is not None


@pytest.mark.parametrize("phase", [Phase.startup, Phase.data, Phase.eval, Phase.idle])
def test_a_session_phase_is_not_overdue_while_its_session_computes(world: World, phase: Phase) -> None:
    """Only CPU time shows the work of a tokenizer or of the script's own evaluation."""
    hang_in(world, phase)
    assert world.advance(19.0, every=0.5, doing=world.computing(1, 0.4)) is None
    assert world.stalls(61.0, every=0.5).culprits == (1,)


def test_nothing_but_computing_is_overdue_at_the_deadline_without_observations(
    make: Callable[..., World],
) -> None:
    """An endless loop in a callback is ended, but not before half an hour; data transferred meanwhile is
    progress.
    """
    world = make(settings=DeadlineSettings(ceiling_seconds=4000.0))
    world.watch.phase_durations.earlier_attempts = {Phase.data: Durations.of([0.01] * 30)}
    for _ in range(2):
        world.writers[1].replace(Phase.data)
    world.issue(0, "all_reduce")

    def compute() -> None:
        world.cpu[1] += 1.0

    def fetch() -> None:
        compute()
        io_bytes = world.io[1]
        assert io_bytes is not None
        world.io[1] = io_bytes + 64 * 1024

    assert world.advance(2000.0, every=1.0, doing=fetch) is None
    assert world.advance(1750.0, every=1.0, doing=compute) is None
    stall = world.stalls(100.0, every=1.0, doing=compute)
    assert (stall.culprits, stall.deadline_seconds) == ((1,), 1800.0)
    assert "CPU time as the only activity" in stall.sentence


def test_a_reward_that_only_computes_is_overdue(world: World) -> None:
    """An endless regular expression is an example."""
    hang_in(world, Phase.reward)
    stall = world.stalls(25.0, every=0.5, doing=world.computing(1, 0.4))
    assert (stall.culprits, stall.phase) == ((1,), Phase.reward)


def test_a_rank_that_issues_collectives_is_not_overdue(world: World) -> None:
    """This holds in every phase."""
    for writer in world.writers:
        writer.replace(Phase.generate)

    def gather() -> None:
        for rank in (0, 1):
            world.complete(rank, world.issue(rank, "all_gather"))

    assert world.advance(120.0, every=0.5, doing=gather) is None
    world.stalls(25.0, every=0.5)


def test_no_rank_is_blamed_when_all_wait_in_their_backward(world: World) -> None:
    """The recorders are fetched before any rank is named: all wait in C++."""
    for rank in (0, 1):
        world.writers[rank].replace(Phase.forward_backward)
        world.issue(rank, "all_reduce", noted=False)
    stall = world.stalls(25.0)
    assert (stall.culprits, stall.cause) == ((), Cause.no_progress)
