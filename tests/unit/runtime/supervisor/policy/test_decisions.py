"""A failure is restarted within the budget, unless a restart cannot help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.builders.runtime.failure_stories import BUG, KILLED, NO_START, history
from support.journal import as_event, as_events

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide, start_of
from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.verdict import Location, RewardFunction, Verdict

KNOWN = {"killed": KILLED, "bug": BUG, "start": NO_START}
EARLIER_BUG = "KeyError@train.py:3:step5"


def told(story: str, *, trained: bool = True) -> History:
    """Return the history of a story: names or signatures of failures, and steps of newer checkpoints."""
    words = [KNOWN[word].signature if word in KNOWN else word for word in story.split()]
    return history([word if word.isdigit() else f"!{word}" for word in words], trained=trained)


def decided(story: str, *, trained: bool = True, budget: int = 3, **changes: Any) -> Decision:
    """Decide on the last failure of a story."""
    what = replace(KNOWN[story.split()[-1]], **changes)
    return decide(
        told(story, trained=trained), what, Budget(failures_without_progress=budget), stopping=False
    )


@pytest.mark.parametrize(
    ("why", "story", "restarts"),
    [
        ("first kill", "killed", True),
        ("within the budget", "killed killed killed", True),
        ("over the budget", "killed killed killed killed", False),
        ("refilled by progress", "killed killed killed 5 killed", True),
        ("not refilled by an old step", "5 killed killed killed 5 killed", False),
        ("the same kill twice is not deterministic", "killed killed", True),
        ("an exception once", "bug", True),
        ("the same exception again", "bug bug", False),
        ("again after another one", "bug killed bug", False),
        ("other exceptions", "a b bug", True),
        ("the same with a newer checkpoint in between", "bug 5 bug", False),
        ("the same line at another step", f"{EARLIER_BUG} 5 bug", True),
        ("with a newer checkpoint in between, after another failure", "a bug 5 bug", False),
        ("with a newer checkpoint long ago", "bug 5 bug bug", False),
        ("once before a newer checkpoint, and another failure since", "bug 5 a bug", True),
        ("once before a newer checkpoint, and two other failures since", "bug 5 a b bug", True),
        ("a signature that sorts before it", "A@train.py:1:step7 x bug", True),
        ("a signature that sorts after it", "Z@train.py:1:step7 x bug", True),
        ("a start after a step", "start", True),
        ("a start after a step, again", "start start", False),
    ],
)
def test_decisions(why: str, story: str, restarts: bool) -> None:
    """The table of decisions, with the default budget of three."""
    decision = decided(story)
    assert decision.action is (Action.restart if restarts else Action.stop), why
    assert decision.reason


@pytest.mark.parametrize("story", ["5 bug a b bug", "5 a bug b bug"])
def test_every_failure_since_the_last_progress_is_compared(story: str) -> None:
    """Not only the first of them, or the last."""
    assert decided(story, budget=9).action is Action.stop


@pytest.mark.parametrize(
    ("story", "restarts"), [("start", True), ("start start", False), ("x start", True), ("killed", True)]
)
def test_decisions_before_the_first_step(story: str, restarts: bool) -> None:
    """A start that fails may pass by itself once, as far as it is no exception of the script."""
    assert decided(story, trained=False).action is (Action.restart if restarts else Action.stop)


def test_nothing_is_restarted_after_a_stop_request() -> None:
    """No kind of failure is restarted."""
    decision = decide(told("killed"), KILLED, Budget(), stopping=True)
    assert decision.action is Action.stop
    assert "stop" in decision.reason


@pytest.mark.parametrize("failures", [0, 1, 5])
def test_the_budget_is_the_number_of_failures_recovered(failures: int) -> None:
    """The next failure in a row ends the run."""
    if failures:
        assert decided("killed " * failures, budget=failures).action is Action.restart
    assert decided("killed " * (failures + 1), budget=failures).action is Action.stop


@pytest.mark.parametrize(
    ("story", "budget", "words"),
    [
        ("killed killed killed killed", 3, "4 failures in a row without a newer checkpoint (budget 3)"),
        ("killed", 0, "1 failure in a row"),
        ("start start", 3, "when the script started"),
        ("bug bug", 3, "at the same step"),
    ],
)
def test_the_reason_to_give_up_has_the_numbers_and_the_place(story: str, budget: int, words: str) -> None:
    """The reader looks for the error of a start in another place."""
    assert words in decided(story, budget=budget).reason


def test_a_rank_that_fails_at_a_step_is_restarted_at_once() -> None:
    """Only a start that failed is delayed."""
    decision = decided("killed")
    assert decision == Decision(action=Action.restart, reason="from the checkpoint that rank 0 chooses")
    assert decision.delay_seconds == 0.0
    assert not decision.patient


def test_a_negative_budget_is_refused() -> None:
    """The error is one that the user can correct."""
    with pytest.raises(ConfigError, match="-1"):
        Budget(failures_without_progress=-1)


def test_an_uninterruptible_rank_is_decided_like_any_other() -> None:
    """Whether it can be killed is known only later; the same budget limits both."""
    for story in ("killed", "killed killed killed killed"):
        assert decided(story, uninterruptible=True) == decided(story)


@pytest.mark.parametrize("trained", [False, True])
def test_an_error_that_no_restart_can_help_ends_the_run_at_once(trained: bool) -> None:
    """Also after progress: the code cannot be compiled, or the script refuses its arguments."""
    decision = decided("start", trained=trained, final="the code cannot be compiled")
    assert decision.action is Action.stop
    assert "cannot be compiled" in decision.reason


FIRST = replace(NO_START, exception="ImportError")
"""An exception of the script, by its class."""


def before_first_step(what: Verdict, *earlier: dict[str, object]) -> Decision:
    """Decide on the first fault of a run."""
    records: list[dict[str, object]] = [
        {"event": "run_started", "time": 0.0},
        *earlier,
        {"event": "incident", "cause": "x", "step": what.step, "signature": what.signature,
        "repeat_key": what.repeat_key},
    ]  # fmt: skip
    return decide(History.of(as_events(records)), what, Budget(), stopping=False)


def test_an_exception_before_the_runs_first_step_ends_it_at_once() -> None:
    """As under torchrun: nothing is lost, and the user reads it sooner. The reason has the exception."""
    what = replace(FIRST, step=0)
    decision = before_first_step(what)
    assert decision.action is Action.stop
    assert "ImportError was raised before the run's first step" in decision.reason


@pytest.mark.parametrize(
    "changes",
    [
        *({"origin": origin} for origin in (Origin.files, Origin.network, Origin.device)),
        *({"cause": cause} for cause in (Cause.gpu_oom, Cause.host_oom, Cause.shm_full)),
        {"cause": Cause.collective_mismatch},
    ],
)
def test_what_is_no_exception_of_the_script_is_tried_again_before_the_first_step(
    changes: dict[str, Any],
) -> None:
    """A file that is being written, a hub that is away, a device that another process still holds; memory and
    collectives.
    """
    what = replace(FIRST, step=0, **changes)
    assert what.repeat_key == ""
    assert before_first_step(what).action is Action.restart


@pytest.mark.parametrize(
    ("raised", "action"), [(False, Action.restart), (True, Action.stop)], ids=["time limit", "bug"]
)
def test_a_rewards_own_time_limit_before_the_first_step_is_no_bug(raised: bool, action: Action) -> None:
    """Also one of a class that is no error of the network, such as `subprocess.TimeoutExpired`."""
    reward = RewardFunction(file="/me/train.py", function="judge", raised=raised)
    assert before_first_step(replace(FIRST, step=0, failed_reward=reward)).action is action


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step_committed", "step": 1, "train_call": 1, "time": 1.0},
        {"event": "checkpoint_published", "step": 1, "train_call": 1, "path": "p", "time": 1.0},
        {"event": "trains_without_trainer", "time": 1.0},
    ],
)
def test_a_run_with_a_step_or_without_a_trainer_is_started_again(event: dict[str, object]) -> None:
    """It has something to lose, or its steps are not known."""
    assert before_first_step(replace(FIRST, step=0), event).action is Action.restart


def test_the_first_step_of_a_run_that_began_with_another_runs_checkpoint() -> None:
    """It is counted from there: `--resume-from` a checkpoint of step 7."""
    begun = {
        "event": "train_started",
        "rank": 0,
        "train_call": 1,
        "step": 7,
        "trainer_class": "T",
        "output_dir": "o",
    }
    assert before_first_step(FIRST, begun).action is Action.stop
    assert before_first_step(replace(FIRST, step=8), begun).action is Action.restart


def resumed_twice(
    first: Verdict, second: Verdict, *loaded: dict[str, object], starts_over: bool = False
) -> Decision:
    """Decide on the second of two exceptions while a run resumes from step 5.

    Args:
        loaded: what happens before each exception.
    """
    made = history(["5"])
    for number, what in enumerate((first, second), start=1):
        for record in (
            {"event": "attempt_started", "attempt": number},
            {"event": "resume_chosen", "path": "out/checkpoint-5", "step": 5},
            *loaded,
            {"event": "incident", "cause": "x", "signature": what.signature, "repeat_key": what.repeat_key},
        ):
            made.apply(as_event(record))
    return decide(made, second, Budget(), stopping=False, starts_over=starts_over)


LOADS = replace(FIRST, location=Location(file="/w/train.py", line=40, function="main"))


def test_the_same_exception_twice_while_resuming_ends_the_run() -> None:
    """Once from memory and once from disk, with the line; then it is said what would help, or what
    follows.
    """
    stop = resumed_twice(LOADS, LOADS)
    assert stop.action is Action.stop
    assert stop.reason.startswith(
        "this script fails when it resumes, at train.py:40 in main; --on-resume-failure"
    )
    assert resumed_twice(LOADS, LOADS, starts_over=True).reason.endswith("; a new run starts over")


def test_other_failures_of_two_resumed_attempts_are_not_told_so() -> None:
    """Another line, another kind of fault, or one after the call had been loaded."""
    other = replace(LOADS, exception="ValueError")
    files = replace(LOADS, origin=Origin.files)
    begun = {"event": "train_started", "rank": 0, "train_call": 1, "step": 5}
    assert "fails when it resumes" not in resumed_twice(other, LOADS).reason
    assert resumed_twice(files, files).action is Action.restart
    assert "fails when it resumes" not in resumed_twice(LOADS, LOADS, begun).reason


@pytest.mark.parametrize(("cause", "place"), [("signal", "in memory"), ("host_oom", "on disk")])
def test_the_announced_start_is_where_the_snapshot_is_loaded_from(cause: str, place: str) -> None:
    """After host memory has run out, the snapshot is written to disk, and its memory is freed for the
    ranks.
    """
    told = History.of(
        as_events([
            {
                "event": "train_started", "time": 1.0, "train_call": 1, "rank": 0, "step": 0,
                "trainer_class": "T",
                "output_dir": "/o",
            },
            {"event": "checkpoint_staged", "time": 2.0, "train_call": 1, "step": 2, "rank": 0},
            {"event": "incident", "time": 3.0, "train_call": 1, "step": 2, "cause": cause, "signature": "s"},
        ])
    )  # fmt: skip
    assert start_of(told) == f"from the snapshot of step 2 {place}"
