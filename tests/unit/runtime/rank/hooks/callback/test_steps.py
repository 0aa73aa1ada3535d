"""What the end of a step does: its vote, what was requested, alarms, snapshots and cleanup."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.builders.trainers.callback_loop import Events, FakeCadence, Loop, Reading, with_flags
from transformers import TrainerControl

from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.rank.memory.cleanup_policy import StepMemory
from grpo_run.runtime.rank.step.step_vote import UserRequests
from grpo_run.runtime.rank.vote import Vote
from grpo_run.watchdog.observation import Alarm, Phase


def test_a_step_is_committed_before_the_next_optimizer_step(loop: Loop, reading: Reading) -> None:
    """The vote starts at the end of the step and is collected before weights change again. Votes are
    counted, and the time spent waiting for them.
    """
    loop.step()
    assert (reading().step, reading().voted_step, reading().committed_step) == (1, 1, 0)
    loop.step()
    loop.step()
    assert (reading().voted_step, reading().committed_step, reading().votes) == (3, 2, 2)
    assert reading().vote_wait_seconds >= 0


def test_results_that_are_collected_together_are_combined(loop: Loop, session: Any) -> None:
    """A save may collect a vote early. The flags of both votes still take effect."""
    session.board.request_save()
    loop.step()
    session.board.request_stop()
    loop.step()
    loop.step()
    assert loop.saver.stopping
    assert loop.saved[-1] == loop.stopped_at == 3


def test_the_last_vote_is_collected_at_the_end(session: Any, reading: Reading) -> None:
    """The last step is committed too."""
    loop = Loop(session)
    loop.begin(8)
    loop.step()
    loop.callback.on_train_end(loop.args, loop.state, TrainerControl())
    session.slot.publish()
    assert reading().committed_step == 9


def test_the_fingerprint_of_phases_is_voted_on(loop: Loop, session: Any) -> None:
    """Each vote carries the phases since the vote before."""
    fingerprints = []
    start = session.votes.start

    def record(vote: Vote) -> None:
        fingerprints.append(vote.fingerprint)
        start(vote)

    session.votes.start = record
    loop.step_vote.fingerprint.enter(Phase.generate)
    loop.step()
    loop.step()
    assert fingerprints[0] != 0
    assert fingerprints[1] == 0


@pytest.mark.parametrize("hooks", [True, False])
def test_a_stop_acts_within_two_steps_with_a_checkpoint(session: Any, hooks: bool) -> None:
    """On the step that all ranks agreed on, with and without `on_pre_optimizer_step`."""
    loop = Loop(session, hooks_before_optimizer=hooks)
    loop.begin()
    loop.step()
    session.board.request_stop()
    loop.step()
    loop.step()
    assert loop.saver.stopping
    assert loop.stopped_at == 3
    assert loop.saved == [3]


def test_without_a_request_nothing_is_saved_or_stopped(loop: Loop) -> None:
    """The script's own save schedule is unchanged."""
    for _ in range(9):
        loop.step()
    assert (loop.saved, loop.stopped_at, loop.saver.stopping) == ([], None, False)


def test_a_save_request_before_the_call_is_served_once(session: Any, requests: UserRequests) -> None:
    """Requests are counted over all calls of the attempt: the next call does not repeat the save."""
    session.board.request_save()
    for saved in ([2], []):
        loop = Loop(session, requests=requests)
        loop.begin()
        for _ in range(4):
            loop.step()
        loop.callback.on_train_end(loop.args, loop.state, TrainerControl())
        assert loop.saved == saved


def test_two_ranks_that_see_a_request_a_step_apart_save_once(loop: Loop, session: Any) -> None:
    """The request arrives between the polls of two ranks, so one rank votes for it a step before the
    other.
    """
    loop.step()
    start = session.votes.start
    # the other rank's flag reaches this rank through the vote
    session.votes.start = lambda vote: start(with_flags(vote, save=True))
    loop.step()
    session.votes.start = start
    session.board.request_save()
    for _ in range(5):
        loop.step()
    assert len(loop.saved) == 1


ALARM = Alarm(cause="nonfinite", step=2, sentence="Not finite.", signature="s")


def test_an_alarm_ends_the_attempt_before_anything_else(loop: Loop) -> None:
    """At the end of its step: the next rollout would fail with such weights, and a save would keep them."""

    def raised_at_2(step: int) -> None:
        loop.points.alarm = ALARM if step == 2 else None

    loop.points.step_ends.append(raised_at_2)
    loop.step()
    with pytest.raises(AlarmRaised) as raised:
        loop.step()
    assert raised.value.alarm is ALARM
    assert loop.saved == []


def test_an_alarm_of_another_rank_ends_the_attempt_before_the_next_optimizer_step(
    session: Any, loop: Loop
) -> None:
    """Only that rank knows what it is."""
    start = session.votes.start
    session.votes.start = lambda vote: start(with_flags(vote, alarm=True))
    loop.step()
    with pytest.raises(AlarmRaised) as raised:
        loop.callback.on_pre_optimizer_step(loop.args, loop.state, TrainerControl())
    assert raised.value.alarm is None


def due_steps(session: Any, cadence: FakeCadence) -> list[int]:
    """Return the steps after which a snapshot is due, of seven."""
    loop = Loop(session, cadence=cadence)
    loop.begin()
    due = []
    for _ in range(7):
        loop.step()
        if cadence.due:
            due.append(loop.state.global_step)
    return due


@pytest.mark.parametrize(
    ("is_main", "fixed", "wanted", "due", "asked"),
    [
        (True, (), (), [], range(1, 8)),
        (False, (2, 4), (), [2, 4], []),
        (True, (), (3,), [4], range(1, 8)),
        (False, (), (1, 2, 3), [], []),
    ],
    ids=["never", "fixed", "requested", "not by this rank"],
)
def test_a_snapshot_is_due_at_a_fixed_step_or_a_step_after_its_request(
    session: Any, is_main: bool, fixed: Any, wanted: Any, due: list[int], asked: Sequence[int]
) -> None:
    """Every rank computes the fixed steps, without a vote. Only rank 0 requests a snapshot, once for each;
    the vote tells all ranks.
    """
    session.is_main = is_main
    cadence = FakeCadence(fixed=fixed, wanted=wanted)
    assert due_steps(session, cadence) == due
    assert cadence.asked == list(asked)


def test_a_snapshot_requested_by_another_rank_is_due(session: Any) -> None:
    """The request arrives through the vote."""
    start = session.votes.start
    session.is_main = False
    session.votes.start = lambda vote: start(with_flags(vote, snapshot=vote.step == 2))
    assert due_steps(session, FakeCadence()) == [3]


def growing(session: Any) -> None:
    """Let the memory of the rank grow by 1 GiB in each step, and consider it every second step."""
    sizes = itertools.count(1)

    def step_ended() -> StepMemory:
        size = next(sizes) * 2**30
        return StepMemory(allocated=0, reserved=0, peak_allocated=0, anonymous=size, capacity=0)

    session.config = replace(session.config, cleanup_every=2)
    session.accounting = SimpleNamespace(step_ended=step_ended)


def test_cleanup_follows_the_vote_on_it(session: Any, events: Events, reading: Reading) -> None:
    """Steps 1 to 3 are not looked at, 4 and 5 are compared with 6 and 7, and the vote on step 8 is collected
    before step 9 ends.
    """
    growing(session)
    loop = Loop(session)
    loop.begin()
    for _ in range(8):
        loop.step()
    assert reading().cleanup_runs == 0
    loop.step()
    (record,) = [record for record in events() if record["event"] == "cleanup"]
    assert (record["step"], record["garbage"], record["caches"]) == (9, True, False)
    assert reading().cleanup_runs == 1


def test_there_is_no_cleanup_beside_a_vllm_engine_that_sleeps(session: Any, reading: Reading) -> None:
    """Between two rollouts its memory is not mapped."""
    growing(session)
    loop = Loop(session, args=SimpleNamespace(use_vllm=True, vllm_enable_sleep_mode=True))
    loop.begin()
    for _ in range(12):
        loop.step()
    assert reading().cleanup_runs == 0
