"""The guard's callback at the events of a `train()` call, with one rank: vote, agree, act."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from grpo_run.runtime.errors import GuardTripped
from grpo_run.trainers.accounting.step_memory import StepMemory
from grpo_run.trainers.calls.requests import UserRequests
from grpo_run.trainers.calls.step_vote import StepVote
from grpo_run.trainers.hooks.callback import GuardCallback
from grpo_run.trainers.learning.guards import LearningGuards
from grpo_run.trainers.rank.vote import Vote
from grpo_run.trainers.saving.cadence import Cadence
from grpo_run.watchdog.learning.observations import StepValues
from grpo_run.watchdog.learning.rules import Guard, Response, Rules
from grpo_run.watchdog.observation import Phase, RankState, Slot

Reading = Callable[[], Slot]
Events = Callable[[], list[dict[str, Any]]]


class FakeCadence(Cadence):
    """A cadence with given steps; records what it is asked."""

    def __init__(self, *, wanted: tuple[int, ...] = (), fixed: tuple[int, ...] = ()) -> None:
        super().__init__(0, failure_seconds=1.0, notify=lambda *arguments: None, clock=lambda: 0.0)
        self.wanted_steps, self.fixed_steps = wanted, fixed
        self.begun: list[int] = []
        self.asked: list[int] = []

    def begin(self, first_step: int) -> None:
        """Record the first step."""
        self.begun.append(first_step)

    def wanted(self, step: int) -> bool:
        """Record the question."""
        self.asked.append(step)
        return step in self.wanted_steps

    def fixed(self, step: int) -> bool:
        """Use the given steps."""
        return step in self.fixed_steps


class Loop:
    """A `train()` call of 10 steps that calls the callback's events as transformers does."""

    def __init__(
        self,
        session: Any,
        *,
        cadence: Cadence | None = None,
        requests: UserRequests | None = None,
        hooks_before_optimizer: bool = True,
        restoring: bool = False,
    ) -> None:
        self.cadence = cadence or FakeCadence()
        self.guards = LearningGuards(session, 1, sampling_group=0)
        self.step_vote = StepVote(session, requests or UserRequests(session.board), self.guards)
        self.values = StepValues()
        exact: Any = SimpleNamespace(
            begin=lambda folder: None, begin_epoch=int, begin_step=int, end=int, close=int
        )
        reader: Any = SimpleNamespace(begin_step=int, take=lambda: self.values)
        self.saver: Any = SimpleNamespace(cadence=self.cadence, stopping=False, saved_step=-1)
        self.callback = GuardCallback(
            session, 1, self.step_vote, self.saver, exact, self.guards, reader, restoring=restoring
        )
        self.state = TrainerState(global_step=0, max_steps=10)
        self.args: Any = SimpleNamespace()
        self.hooks_before_optimizer = hooks_before_optimizer
        self.saved: list[int] = []
        self.stopped_at: int | None = None

    def begin(self, step: int = 0) -> None:
        """Start the loop at `step`."""
        self.state.global_step = step
        self.callback.on_train_begin(self.args, self.state, TrainerControl())

    def step(self) -> None:
        """Take one optimizer step; save and stop as the saver would."""
        control = TrainerControl()
        self.callback.on_step_begin(self.args, self.state, control)
        if self.hooks_before_optimizer:
            self.callback.on_pre_optimizer_step(self.args, self.state, control)
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, control)
        assert not control.should_save, "the script would notice it"
        assert not control.should_training_stop, "the checkpoint would tell a stop by the script"
        if self.cadence.required:
            self.step_vote.collect()
            self.saved.append(self.state.global_step)
        if self.saver.stopping and self.stopped_at is None:
            self.stopped_at = self.state.global_step


@pytest.fixture
def loop(session: Any) -> Loop:
    """A loop that has started."""
    made = Loop(session)
    made.begin()
    return made


def test_the_start_of_a_call_is_published(loop: Loop, reading: Reading, events: Events) -> None:
    """The slot shows state, call and target steps; the journal has `train_started`."""
    slot = reading()
    assert (slot.state, slot.train_call, slot.step, slot.target_steps) == (RankState.training, 1, 0, 10)
    assert slot.phase is Phase.data
    (record,) = events()
    assert (record["event"], record["step"], record["target_steps"]) == ("train_started", 0, 10)
    assert isinstance(loop.cadence, FakeCadence)
    assert loop.cadence.begun == [0]


def test_a_resumed_call_starts_at_its_step(session: Any, reading: Reading) -> None:
    """The step it resumes from counts as committed."""
    Loop(session).begin(4)
    slot = reading()
    assert (slot.step, slot.voted_step, slot.committed_step, slot.resumed_step) == (4, 4, 4, 4)


def test_a_restored_call_journals_no_start(session: Any, reading: Reading, events: Events) -> None:
    """All its steps were taken earlier; `train_started` would count as a resume from its last step."""
    Loop(session, restoring=True).begin(10)
    assert (reading().train_call, reading().step) == (1, 10)
    assert events() == []


def test_a_step_is_committed_before_the_next_optimizer_step(loop: Loop, reading: Reading) -> None:
    """The vote starts at the end of the step and is collected before weights change again."""
    loop.step()
    assert (reading().step, reading().voted_step, reading().committed_step) == (1, 1, 0)
    loop.step()
    assert (reading().voted_step, reading().committed_step) == (2, 1)


def test_the_phases_of_a_step(loop: Loop, reading: Reading) -> None:
    """Forward and backward, then optimizer, then data."""
    control = TrainerControl()
    loop.callback.on_step_begin(loop.args, loop.state, control)
    assert reading().phase is Phase.forward_backward
    loop.callback.on_pre_optimizer_step(loop.args, loop.state, control)
    assert reading().phase is Phase.optimizer
    loop.state.global_step = 1
    loop.callback.on_step_end(loop.args, loop.state, control)
    assert [entry.phase for entry in reading().phases] == [Phase.data]


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


@pytest.mark.parametrize("hooks", [True, False])
def test_a_save_request_makes_one_checkpoint(session: Any, hooks: bool) -> None:
    """Later steps do not repeat it."""
    loop = Loop(session, hooks_before_optimizer=hooks)
    loop.begin()
    session.board.request_save()
    for _ in range(4):
        loop.step()
    assert loop.saved == [2]
    session.board.request_save()
    for _ in range(3):
        loop.step()
    assert loop.saved == [2, 6]


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


def test_two_ranks_that_see_a_request_a_step_apart_save_once(session: Any) -> None:
    """The request arrives between the polls of two ranks, so one rank votes for it a step before the other."""
    loop = Loop(session)
    loop.begin()
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


def with_flags(vote: Vote, **flags: bool) -> Vote:
    """Return the vote as if another rank had set the flags."""
    return replace(vote, flags=vote.flags._replace(**flags))


def test_results_that_are_collected_together_are_combined(session: Any) -> None:
    """A save may collect a vote early. The flags of both votes still take effect."""
    loop = Loop(session)
    loop.begin()
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


def test_a_step_that_is_not_finite_ends_the_attempt_before_anything_else(loop: Loop) -> None:
    """At its own end: the next rollout would fail with such weights, and a save would keep them."""
    loop.step()
    loop.values = StepValues(finite=False)
    with pytest.raises(GuardTripped) as tripped:
        loop.step()
    assert tripped.value.trip is not None
    assert (tripped.value.trip.guard, tripped.value.trip.step) == (Guard.nonfinite, 2)
    assert loop.saved == []


def test_a_guard_of_another_rank_ends_the_attempt_before_the_next_optimizer_step(
    session: Any, loop: Loop
) -> None:
    """Only that rank knows what it is."""
    start = session.votes.start
    session.votes.start = lambda vote: start(with_flags(vote, nonfinite=True, tripped=True))
    loop.step()
    with pytest.raises(GuardTripped) as tripped:
        loop.callback.on_pre_optimizer_step(loop.args, loop.state, TrainerControl())
    assert tripped.value.trip is None


def test_a_guard_that_warns_is_journaled_once(session: Any, events: Events) -> None:
    """Training goes on."""
    responses = {Guard.nonfinite: Response.warn}
    session.config = replace(session.config, guards=Rules(responses=responses))
    loop = Loop(session)
    loop.begin()
    loop.values = StepValues(finite=False)
    for _ in range(4):
        loop.step()
    tripped = [record for record in events() if record["event"] == "guard_tripped"]
    assert [(record["step"], record["guard"], record["response"]) for record in tripped] == [
        (1, "nonfinite", "warn")
    ]


def test_a_rollout_that_timed_out_is_known_to_the_first_rank(loop: Loop, events: Events) -> None:
    """It goes into the next vote, once."""
    loop.step_vote.report_timed_out()
    for _ in range(3):
        loop.step()
    assert [one["step"] for one in events() if one["event"] == "rollout_timed_out"] == [1]


def growing(session: Any) -> None:
    """Let the memory of the rank grow by 1 GiB in each step, and consider it every second step."""
    sizes = itertools.count(1)

    def step_ended() -> StepMemory:
        size = next(sizes) * 2**30
        return StepMemory(
            allocated=0, reserved=0, peak_allocated=0, resident=size, anonymous=size, capacity=0
        )

    session.config = replace(session.config, hygiene_every=2)
    session.accounting = SimpleNamespace(step_ended=step_ended)


def test_hygiene_follows_the_vote_on_it(session: Any, events: Events, reading: Reading) -> None:
    """Steps 1 to 3 are not looked at, 4 and 5 are compared with 6 and 7, and the vote on step 8 is collected before step 9 ends."""
    growing(session)
    loop = Loop(session)
    loop.begin()
    for _ in range(8):
        loop.step()
    assert reading().hygiene_runs == 0
    loop.step()
    (record,) = [record for record in events() if record["event"] == "hygiene"]
    assert (record["step"], record["garbage"], record["caches"]) == (9, True, False)
    assert reading().hygiene_runs == 1


def test_there_is_no_hygiene_beside_a_vllm_engine_that_sleeps(session: Any, reading: Reading) -> None:
    """Between two rollouts its memory is not mapped."""
    growing(session)
    loop = Loop(session)
    loop.args = SimpleNamespace(use_vllm=True, vllm_enable_sleep_mode=True)
    loop.begin()
    for _ in range(12):
        loop.step()
    assert reading().hygiene_runs == 0


def test_logged_metrics_are_published(loop: Loop, reading: Reading, events: Events) -> None:
    """On the board and in the journal, under grpo-run's field names; other metrics are ignored."""
    logs = {"reward": 0.5, "completions/mean_length": 12.0, "loss": 0.25, "learning_rate": 1e-5, "kl": 0.1}
    loop.state.global_step = 3
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    slot = reading()
    assert (slot.reward, slot.completion_length, slot.loss) == (0.5, 12.0, 0.25)
    (record,) = [record for record in events() if record["event"] == "step_logged"]
    assert (record["step"], record["reward"], record["completion_length"]) == (3, 0.5, 12.0)
    assert "kl" not in record


def test_the_summary_of_a_call_is_not_journaled_as_a_step(loop: Loop, events: Events) -> None:
    """Its loss is a mean over the whole call."""
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs={"train_runtime": 3.0, "loss": 0.5})
    assert [record for record in events() if record["event"] == "step_logged"] == []


@pytest.mark.parametrize("logs", [None, {}, {"reward": "high"}, {"reward": True}])
def test_logs_without_numbers_are_ignored(loop: Loop, reading: Reading, logs: dict[str, Any] | None) -> None:
    """They neither change the board nor raise."""
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    assert math.isnan(reading().reward)


def test_votes_are_counted(loop: Loop, reading: Reading) -> None:
    """Together with the time spent waiting for them."""
    for _ in range(3):
        loop.step()
    assert reading().votes == 2
    assert reading().vote_wait_seconds >= 0


def test_the_fingerprint_of_phases_is_voted_on(session: Any) -> None:
    """Each vote carries the phases since the vote before."""
    loop = Loop(session)
    loop.begin()
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


# ---- snapshots in memory ----


def due_steps(session: Any, cadence: Cadence, steps: int = 7) -> list[int]:
    """Return the steps after which a snapshot is due."""
    loop = Loop(session, cadence=cadence)
    loop.begin()
    due = []
    for _ in range(steps):
        loop.step()
        if cadence.due:
            due.append(loop.state.global_step)
    return due


def test_a_cadence_that_schedules_nothing_is_never_due(session: Any) -> None:
    """Direct saves use such a cadence."""
    assert due_steps(session, FakeCadence()) == []


def test_a_fixed_cadence_needs_no_vote(session: Any) -> None:
    """Every rank computes the same steps."""
    session.is_main = False
    assert due_steps(session, FakeCadence(fixed=(2, 4))) == [2, 4]


def test_a_requested_snapshot_is_due_one_step_later(session: Any) -> None:
    """Once the vote has told all ranks; one snapshot per request."""
    cadence = FakeCadence(wanted=(3,))
    assert due_steps(session, cadence) == [4]
    assert cadence.asked == [1, 2, 3, 4, 5, 6, 7]


def test_only_rank_0_requests_snapshots(session: Any) -> None:
    """The other ranks follow the vote."""
    cadence = FakeCadence(wanted=(1, 2, 3))
    session.is_main = False
    assert due_steps(session, cadence) == []
    assert cadence.asked == []


def test_a_snapshot_requested_by_another_rank_is_due(session: Any) -> None:
    """The request arrives through the vote."""
    start = session.votes.start
    session.is_main = False
    session.votes.start = lambda vote: start(with_flags(vote, snapshot=vote.step == 2))
    assert due_steps(session, FakeCadence()) == [3]


def test_one_request_makes_one_snapshot(session: Any) -> None:
    """With the real cadence, whose request takes effect a step later."""
    now = [0.0]
    intervals: list[int] = []
    cadence = Cadence(
        None,
        failure_seconds=2000.0,
        notify=lambda steps, cost, step: intervals.append(steps),
        clock=lambda: now[0],
    )
    loop = Loop(session, cadence=cadence)
    loop.state.max_steps = 100
    loop.begin()
    taken = []
    for _ in range(60):
        now[0] += 10.0
        loop.step()
        if cadence.due:
            now[0] += 10.0
            taken.append(loop.state.global_step)
            cadence.taken(loop.state.global_step, 10.0)
    # sqrt(2 * 10 * 2000) is 200 s, 20 steps; each snapshot is due a step after it was requested
    assert intervals == [20]
    assert taken == [2, 4, 25, 46]
