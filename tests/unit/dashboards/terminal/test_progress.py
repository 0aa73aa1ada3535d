"""The progress line of `grpo-run launch`."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.dashboards.terminal._progress import ProgressLine, progress_line
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.progress import StepTimes
from grpo_run.runtime.history.recovery import Checkpoint, Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank


def line(
    state: str = "running",
    slots: tuple[Slot | None, ...] = (None, None),
    awaited: AwaitedRank | None = None,
    read_at_seconds: float = 996.0,
    **fields: Any,
) -> ProgressLine:
    """The progress line of a run with these fields in its history."""
    status = RunStatus(
        run_id="night", state=state, sentence="", history=History(**fields), slots=slots, supervisor_pid=1,
        awaited=awaited, read_at_seconds=read_at_seconds,
    )  # fmt: skip
    return progress_line(status)


def line_of(state: str = "running", **fields: Any) -> str:
    """The same as text."""
    return line(state, **fields).text()


def pace(step_seconds: float) -> StepTimes:
    """Ten steps of this duration."""
    times = StepTimes()
    times.begin(0, 0, 0.0)
    for step in range(1, 11):
        times.commit(0, step, step * step_seconds)
    return times


def test_nothing_is_shown_before_the_first_step() -> None:
    """A script without a Trainer has none."""
    assert line_of() == line_of("finished") == ""


def recovery(seconds: float | None) -> Recovery:
    """A fault, recovered or not."""
    return Recovery(cause="signal", rank=1, step=7, action="restart", recovery_seconds=seconds)


CHECKPOINT = Checkpoint(step=5, path="x", verified=True)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"step": 7}, "step 7 · 2 ranks"),
        ({"step": 7, "target_steps": 40}, "step 7/40 · 2 ranks"),
        ({"step": 7, "reward": 0.5236, "loss": 0.1}, "step 7 · reward 0.524 · 2 ranks"),
        ({"step": 7, "loss": 2.25}, "step 7 · loss 2.250 · 2 ranks"),
        ({"step": 7, "snapshot_step": 6}, "step 7 · 2 ranks · snapshot 6"),
        ({"step": 7, "checkpoint": CHECKPOINT}, "step 7 · 2 ranks · checkpoint 5"),
        ({"step": 7, "snapshot_step": 6, "checkpoint": CHECKPOINT}, "step 7 · 2 ranks · snapshot 6"),
        ({"step": 7, "snapshot_step": 4, "checkpoint": CHECKPOINT}, "step 7 · 2 ranks · checkpoint 5"),
        ({"step": 7, "train_call": 2, "snapshot_step": 50}, "step 7 · 2 ranks"),
        ({"step": 7, "train_call": 2, "checkpoint": CHECKPOINT}, "step 7 · 2 ranks"),
        ({"step": 7, "recoveries": [recovery(None)]}, "step 7 · 2 ranks"),
        ({"step": 7, "recoveries": [recovery(1.0)]}, "step 7 · 2 ranks · 1 fault recovered"),
        ({"step": 7, "recoveries": [recovery(1.0)] * 2}, "step 7 · 2 ranks · 2 faults recovered"),
    ],
)
def test_every_known_fact_is_shown(fields: dict[str, Any], line: str) -> None:
    """Steps, the last reward or else the loss, ranks, snapshot, checkpoint and faults."""
    assert line_of(**fields) == line


@pytest.mark.parametrize("state", ["suspect", "collecting", "recovering", "stopping"])
def test_the_line_says_why_training_stands_still(state: str) -> None:
    """A state other than running is named first."""
    line = line_of(state, step=7)
    assert line.endswith("step 7 · 2 ranks")
    assert not line.startswith("step")


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("running", "step 70/200 · 0.13 s/step · 17 s left · reward 0.970 · 2 ranks"),
        ("stopping", "stopping · step 70/200 · 0.13 s/step · reward 0.970 · 2 ranks"),
        ("recovering", "restarting 2 ranks · step 70/200 · 0.13 s/step · reward 0.970 · 2 ranks"),
    ],
)
def test_step_time_and_time_left_are_shown(state: str, line: str) -> None:
    """The time left only while training goes on."""
    assert line_of(state, step=70, target_steps=200, steps=pace(0.13), reward=0.97) == line


def test_without_a_target_no_time_is_left() -> None:
    """The number of steps is not known."""
    assert line_of(step=70, steps=pace(0.13)) == "step 70 · 0.13 s/step · 2 ranks"


def starting(*slots: Slot | None, **fields: Any) -> str:
    """The line of a run that is starting, with these slots."""
    made = line("starting", slots, **fields)
    assert made.starting
    return made.text()


def test_ranks_that_do_not_run_yet_are_not_shown_as_training(make_slot: Any) -> None:
    """Fresh interpreters import for many seconds; the last step and reward belong to the attempt before."""
    fault = recovery(None)
    assert starting(None, None) == "starting 2 ranks"
    assert starting(None, None, step=40, reward=0.5) == "starting 2 ranks"
    assert starting(make_slot(0), None, step=40, recoveries=[fault]) == "restarting 2 ranks after step 40"
    assert starting(None, None, step=40, recoveries=[recovery(1.0)]) == "starting 2 ranks"


def test_a_start_says_how_far_the_ranks_are(make_slot: Any) -> None:
    """In the script before training, or in the first step of the attempt."""
    script = [make_slot(rank, state=RankState.starting, train_call=0, step=0) for rank in (0, 1)]
    assert starting(*script) == "starting: the script runs on 2 ranks"
    training = [make_slot(rank, step=38, target_steps=200) for rank in (0, 1)]
    assert starting(*training, step=40, recoveries=[recovery(None)]) == "restarting: 2 ranks in step 39/200"


def test_a_start_after_finished_training_names_no_step(make_slot: Any) -> None:
    """A restarted script whose `train()` calls have all finished does not train a step beyond the last
    one.
    """
    after = [make_slot(rank, state=RankState.between, step=4, target_steps=4) for rank in (0, 1)]
    assert starting(*after, step=4, recoveries=[recovery(None)]) == "restarting: the script runs on 2 ranks"


def waiting(
    state: str = "running", callback: str = "", seconds: float = 360.0, **fields: Any
) -> ProgressLine:
    """The line of a run in which rank 0 waits for rank 1, with a deadline of 27 minutes, or 60 s for
    callbacks.
    """
    phase, deadline = (Phase.callback, 60.0) if callback else (Phase.reward, 1620.0)
    awaited = AwaitedRank(
        rank=1, phase=phase, callback=callback, since_seconds=1000.0, deadline_at_seconds=1000.0 + deadline,
        busy=None, waiters=(0,),
    )  # fmt: skip
    return line(state, awaited=awaited, read_at_seconds=1000.0 + seconds, **fields)


def test_the_line_says_who_is_waited_for() -> None:
    """Where, for how long and until when; the time left is not known meanwhile."""
    long = waiting(step=70, target_steps=200, steps=pace(0.13), reward=0.97)
    assert (long.starting, long.wait is None) == (False, False)
    assert (
        long.text()
        == "waiting for rank 1: reward, 6 min (deadline 27 min) · step 70/200 · 0.13 s/step · reward 0.970 ·"
        " 2 ranks"
    )
    assert long.text(80) == "waiting for rank 1: reward, 6 min (deadline 27 min) · step 70/200 · reward 0.970"
    callback = waiting(callback="MyCallback.on_step_end", seconds=41.0, step=70, target_steps=200)
    assert callback.text(80) == "waiting for rank 1: callback MyCallback.on_step_end, 41 s (deadline 60 s)"
    assert callback.wait != long.wait


@pytest.mark.parametrize("state", ["starting", "suspect", "stopping"])
def test_a_wait_is_shown_in_every_state_in_which_ranks_run(state: str) -> None:
    """It says more than the state."""
    assert (
        waiting(state, step=70).text().startswith("waiting for rank 1: reward, 6 min (deadline 27 min) · st")
    )


@pytest.mark.parametrize("state", ["collecting", "recovering", "finished", "stopped", "failed"])
def test_no_wait_is_shown_while_no_rank_runs(state: str) -> None:
    """The supervisor handles the fault, or the run has ended."""
    made = waiting(state, step=70)
    assert "waiting" not in made.text()
    assert (made.starting, made.wait) == (False, None)


def test_a_short_wait_is_not_shown() -> None:
    """Every step has some."""
    assert waiting(step=70, seconds=4.0).text() == "step 70 · 2 ranks"


FULL: dict[str, Any] = {
    "step": 12345, "target_steps": 20000, "reward": -0.5, "snapshot_step": 12340,
    "recoveries": [recovery(1.0)] * 2,
    "checkpoint": Checkpoint(step=12000, path="x", verified=True), "steps": pace(20.0),
}  # fmt: skip


def test_a_narrow_terminal_gets_the_most_important_facts() -> None:
    """Whole facts are left out; the step stays whatever the width."""
    full = line(**FULL)
    assert (
        full.text()
        == "step 12345/20000 · 20.0 s/step · 42 h 32 min left · reward -0.500 · 2 ranks · snapshot 12340"
        " · 2 faults recovered"
    )
    assert full.text(80) == "step 12345/20000 · 20.0 s/step · 42 h 32 min left · reward -0.500 · 2 ranks"
    assert full.text(40) == "step 12345/20000 · 42 h 32 min left"
    assert full.text(5) == "step 12345/20000"
