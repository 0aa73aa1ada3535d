"""The guard at step boundaries, on a group of one rank: ask, agree, act."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from grpo_run.trainers.hooks.callback import GuardCallback
from grpo_run.trainers.hooks.phases import Path
from grpo_run.watchdog.observation import Phase, RankState, Slot

Reading = Callable[[], Slot]
Events = Callable[[], list[dict[str, Any]]]


class Loop:
    """A `train()` call of 10 steps, as the trainer drives its callbacks."""

    def __init__(self, session: Any, *, hooks_before_optimizer: bool = True, restoring: bool = False) -> None:
        self.callback = GuardCallback(session, 1, Path(), restoring=restoring)
        self.state = TrainerState(global_step=0, max_steps=10)
        self.args: Any = SimpleNamespace()
        self.hooks_before_optimizer = hooks_before_optimizer
        self.saved: list[int] = []
        self.stopped_at: int | None = None

    def begin(self, step: int = 0) -> None:
        """The loop starts, from `step`."""
        self.state.global_step = step
        self.callback.on_train_begin(self.args, self.state, TrainerControl())

    def step(self) -> None:
        """One optimizer step; saves and stops where the callback says so."""
        control = TrainerControl()
        self.callback.on_step_begin(self.args, self.state, control)
        if self.hooks_before_optimizer:
            self.callback.on_pre_optimizer_step(self.args, self.state, control)
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, control)
        if control.should_save:
            self.callback.collect()
            self.saved.append(self.state.global_step)
        if control.should_training_stop and self.stopped_at is None:
            self.stopped_at = self.state.global_step


@pytest.fixture
def loop(session: Any) -> Loop:
    """A loop that has begun."""
    made = Loop(session)
    made.begin()
    return made


def test_a_call_that_begins_is_shown_and_written(loop: Loop, reading: Reading, events: Events) -> None:
    """State, call and target, in the slot and in the journal."""
    slot = reading()
    assert (slot.state, slot.train_call, slot.step, slot.target_steps) == (RankState.training, 1, 0, 10)
    assert slot.phase is Phase.data
    (record,) = events()
    assert (record["event"], record["step"], record["target_steps"]) == ("train_started", 0, 10)


def test_a_resumed_call_begins_at_its_step(session: Any, reading: Reading) -> None:
    """That step was committed before."""
    Loop(session).begin(4)
    slot = reading()
    assert (slot.step, slot.voted_step, slot.committed_step, slot.resumed_step) == (4, 4, 4, 4)


def test_a_call_that_is_only_restored_does_not_begin(session: Any, reading: Reading, events: Events) -> None:
    """Its steps were all taken before; a beginning in the journal would be counted as going on from its end."""
    Loop(session, restoring=True).begin(10)
    assert (reading().train_call, reading().step) == (1, 10)
    assert events() == []


def test_a_step_is_voted_on_at_its_end_and_committed_before_the_next(loop: Loop, reading: Reading) -> None:
    """The weights change again only when all ranks stand at the same step."""
    loop.step()
    assert (reading().step, reading().voted_step, reading().committed_step) == (1, 1, 0)
    loop.step()
    assert (reading().voted_step, reading().committed_step) == (2, 1)


def test_the_phases_of_a_step(loop: Loop, reading: Reading) -> None:
    """Forward and backward, optimizer, data."""
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
    """On the step all ranks agreed on; with or without the hook before the optimizer."""
    loop = Loop(session, hooks_before_optimizer=hooks)
    loop.begin()
    loop.step()
    session.board.request_stop()
    loop.step()
    loop.step()
    assert loop.callback.stopping
    assert loop.stopped_at == 3
    assert loop.saved == [3]


def test_without_a_request_nothing_is_saved_or_stopped(loop: Loop) -> None:
    """The script's schedule is the script's."""
    for _ in range(9):
        loop.step()
    assert (loop.saved, loop.stopped_at, loop.callback.stopping) == ([], None, False)


@pytest.mark.parametrize("hooks", [True, False])
def test_a_save_request_makes_one_checkpoint(session: Any, hooks: bool) -> None:
    """One, however long the run goes on; a second request makes a second."""
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


def test_two_ranks_that_see_a_request_a_step_apart_save_once(session: Any) -> None:
    """The request lands between their two looks: one rank votes for it a step before the other does."""
    loop = Loop(session)
    loop.begin()
    loop.step()
    start = session.votes.start
    session.votes.start = lambda ballot: start(
        _with_save(ballot)
    )  # what the other rank asks reaches this one
    loop.step()
    session.votes.start = start
    session.board.request_save()
    for _ in range(5):
        loop.step()
    assert len(loop.saved) == 1


def _with_save(ballot: Any) -> Any:
    """The ballot as it comes out of a vote in which another rank asked for a checkpoint."""
    from dataclasses import replace

    return replace(ballot, save=True)


def test_requests_read_together_are_not_lost(session: Any) -> None:
    """A save may collect a vote early; what that vote asked for is still done."""
    loop = Loop(session)
    loop.begin()
    session.board.request_save()
    loop.step()
    session.board.request_stop()
    loop.step()
    loop.step()
    assert loop.callback.stopping
    assert loop.saved[-1] == loop.stopped_at == 3


def test_the_last_step_is_always_saved(session: Any) -> None:
    """So that a finished call can be restored."""
    loop = Loop(session)
    loop.begin(8)
    loop.step()
    assert loop.saved == []
    loop.step()
    assert loop.saved == [10]


def test_the_last_vote_is_read_at_the_end(session: Any, reading: Reading) -> None:
    """The last step is committed too."""
    loop = Loop(session)
    loop.begin(8)
    loop.step()
    loop.callback.on_train_end(loop.args, loop.state, TrainerControl())
    session.slot.touch()
    assert reading().committed_step == 9


def test_a_loss_that_is_not_finite_is_told_once(loop: Loop, events: Events) -> None:
    """With its step, after all ranks know."""
    loop.callback.nonfinite = True
    for _ in range(4):
        loop.step()
    tripped = [record for record in events() if record["event"] == "guard_tripped"]
    assert [(record["step"], record["guard"]) for record in tripped] == [(1, "nonfinite")]


def test_hygiene_comes_on_its_step(session: Any, events: Events, reading: Reading) -> None:
    """Every second one here."""
    session.config = replace(session.config, hygiene_every=2)
    loop = Loop(session)
    loop.begin()
    for _ in range(4):
        loop.step()
    assert [record["step"] for record in events() if record["event"] == "hygiene"] == [2, 4]
    assert reading().hygiene_runs == 2


def test_what_is_logged_is_shown_and_written(loop: Loop, reading: Reading, events: Events) -> None:
    """Under our names, whatever TRL calls them; other things are left to others."""
    logs = {"reward": 0.5, "completions/mean_length": 12.0, "loss": 0.25, "learning_rate": 1e-5, "kl": 0.1}
    loop.state.global_step = 3
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    slot = reading()
    assert (slot.reward, slot.completion_length, slot.loss) == (0.5, 12.0, 0.25)
    (record,) = [record for record in events() if record["event"] == "step_logged"]
    assert (record["step"], record["reward"], record["completion_length"]) == (3, 0.5, 12.0)
    assert "kl" not in record


def test_the_summary_at_the_end_is_no_step(loop: Loop, events: Events) -> None:
    """Its loss is a mean over the whole call."""
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs={"train_runtime": 3.0, "loss": 0.5})
    assert [record for record in events() if record["event"] == "step_logged"] == []


@pytest.mark.parametrize("logs", [None, {}, {"reward": "high"}, {"reward": True}])
def test_logs_without_numbers_change_nothing(
    loop: Loop, reading: Reading, logs: dict[str, Any] | None
) -> None:
    """Nor break anything."""
    loop.callback.on_log(loop.args, loop.state, TrainerControl(), logs=logs)
    assert math.isnan(reading().reward)


def test_votes_are_counted(loop: Loop, reading: Reading) -> None:
    """And the time spent waiting for them."""
    for _ in range(3):
        loop.step()
    assert reading().votes == 2
    assert reading().vote_wait_seconds >= 0


def test_a_path_that_differs_is_found_at_the_vote(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint of the phases since the last vote goes into the ballot, and starts over."""
    loop = Loop(session)
    loop.begin()
    fingerprints = []
    start = session.votes.start

    def note(ballot: Any) -> None:
        fingerprints.append(ballot.fingerprint)
        start(ballot)

    session.votes.start = note
    loop.callback._path.enter(Phase.generate)
    loop.step()
    loop.step()
    assert fingerprints[0] != 0
    assert fingerprints[1] == 0


# ---- snapshots in memory ----


class Cadence:
    """Says what it is told to, and notes what it is asked."""

    def __init__(self, *, wanted: tuple[int, ...] = (), fixed: tuple[int, ...] = ()) -> None:
        self.steps = {"wanted": wanted, "fixed": fixed}
        self.asked: list[int] = []
        self.told: list[tuple[int, float]] = []

    def wanted(self, step: int) -> bool:
        """Asked on rank 0."""
        self.asked.append(step)
        return step in self.steps["wanted"]

    def fixed(self, step: int) -> bool:
        """Known to every rank."""
        return step in self.steps["fixed"]

    def taken(self, step: int, cost_seconds: float) -> None:
        """Told of one."""
        self.told.append((step, cost_seconds))


def due_steps(session: Any, cadence: Cadence | None, steps: int = 7) -> list[int]:
    """After which steps a snapshot is due."""
    begun: list[int] = []

    def begin(first_step: int) -> Cadence | None:
        begun.append(first_step)
        return cadence

    session.cadence = begin
    loop = Loop(session)
    loop.begin()
    assert begun == [0]
    due = []
    for _ in range(steps):
        loop.step()
        if loop.callback.snapshot_due():
            due.append(loop.state.global_step)
    return due


def test_without_a_cadence_no_snapshot_is_due(session: Any) -> None:
    """Checkpoints are written directly."""
    assert due_steps(session, None) == []
    Loop(session).callback.snapshot_taken(3, 0.1)


def test_a_fixed_cadence_needs_no_vote(session: Any) -> None:
    """Every rank comes to the same steps by itself."""
    session.is_main = False
    assert due_steps(session, Cadence(fixed=(2, 4))) == [2, 4]


def test_a_wished_snapshot_is_due_after_the_step_that_follows(session: Any) -> None:
    """When all ranks have heard of it; once."""
    cadence = Cadence(wanted=(3,))
    assert due_steps(session, cadence) == [4]
    assert cadence.asked == [1, 2, 3, 4, 5, 6, 7]


def test_only_rank_0_wishes(session: Any) -> None:
    """The others take part in what the vote says."""
    cadence = Cadence(wanted=(1, 2, 3))
    session.is_main = False
    assert due_steps(session, cadence) == []
    assert cadence.asked == []


def test_another_ranks_wish_is_heard(session: Any) -> None:
    """As it comes out of the vote."""
    from dataclasses import replace

    start = session.votes.start
    session.is_main = False
    session.votes.start = lambda ballot: start(replace(ballot, snapshot=ballot.step == 2))
    assert due_steps(session, Cadence()) == [3]


def test_one_wish_makes_one_snapshot(session: Any) -> None:
    """With the real cadence, whose wish is heard a step later than it is voiced."""
    from grpo_run.trainers.saving.cadence import Cadence as Real

    now = [0.0]
    said: list[int] = []
    session.cadence = lambda first_step: Real(
        None,
        failure_seconds=2000.0,
        first_step=first_step,
        say=lambda text, steps, cost, step: said.append(steps),
        clock=lambda: now[0],
    )
    loop = Loop(session)
    loop.state.max_steps = 100
    loop.begin()
    taken = []
    for _ in range(60):
        now[0] += 10.0
        loop.step()
        if loop.callback.snapshot_due():
            now[0] += 10.0
            taken.append(loop.state.global_step)
            loop.callback.snapshot_taken(loop.state.global_step, 10.0)
    # sqrt(2 * 10 * 2000) is 200 s, 20 steps; each one is due a step after it was wished for
    assert said == [20]
    assert taken == [2, 4, 25, 46]


def test_what_was_taken_is_passed_on(session: Any) -> None:
    """With what it cost."""
    cadence = Cadence()
    session.cadence = lambda first_step: cadence
    loop = Loop(session)
    loop.callback.snapshot_taken(1, 0.5)
    loop.begin()
    loop.callback.snapshot_taken(3, 0.25)
    assert cadence.told == [(3, 0.25)]
