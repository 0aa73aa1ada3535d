"""The decision after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace

import pytest

from grpo_run.runtime.continuity.decision import RESTARTS, Action, Decision
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.record.history import History
from grpo_run.runtime.supervision.policy import decide
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.origins import Origin
from grpo_run.watchdog.verdict import Verdict


def verdict(
    *, cause: Cause = Cause.signal, signature: str = "killed", deterministic: bool = False, starting: bool = False,
    origin: Origin = Origin.code, final: str = "",
) -> Verdict:  # fmt: skip
    """A verdict with the fields that the policy reads."""
    return Verdict(
        cause=cause, culprits=(1,), step=7, phase=None, confidence="proved", sentence="It failed.",
        signature=signature, deterministic=deterministic, starting=starting, origin=origin, final=final,
    )  # fmt: skip


def history(story: Sequence[str], *, trained: bool = True) -> History:
    """Return a history: `!name` is an incident with that signature, a number a published checkpoint."""
    records: list[dict[str, object]] = [{"event": "run_started", "time": 0.0}]
    if trained:
        records.append({"event": "step_committed", "time": 1.0, "step": 1, "train_call": 1})
    for word in story:
        if word.startswith("!"):
            records.append({"event": "incident", "cause": "x", "step": 7, "signature": word[1:]})
        else:
            records.append({"event": "checkpoint_published", "step": int(word), "train_call": 1, "path": "p"})
    return History.of(records)


KILLED = verdict()
BUG = verdict(cause=Cause.exception, signature="KeyError@train.py:3:step7", deterministic=True)
STALL = verdict(cause=Cause.generation_stall, signature="generation_stall@train.py:3:step7")
SLOW_JUDGE = verdict(cause=Cause.reward_stall, signature="reward_stall@train.py:3:step7")
BUG_TWICE = f"!{BUG.signature}"
NO_START = verdict(
    cause=Cause.startup_failure, signature="ImportError@train.py:1:step0", deterministic=True, starting=True
)


@pytest.mark.parametrize(
    ("why", "story", "trained", "what", "action"),
    [
        ("first kill", ["!killed"], True, KILLED, Action.restart),
        ("within the budget", ["!killed"] * 3, True, KILLED, Action.restart),
        ("over the budget", ["!killed"] * 4, True, KILLED, Action.stop),
        ("refilled by progress", ["!killed"] * 3 + ["5", "!killed"], True, KILLED, Action.restart),
        (
            "not refilled by an old step",
            ["5"] + ["!killed"] * 3 + ["5", "!killed"],
            True,
            KILLED,
            Action.stop,
        ),
        ("the same kill twice is not deterministic", ["!killed", "!killed"], True, KILLED, Action.restart),
        ("an exception once", [BUG_TWICE], True, BUG, Action.restart),
        ("the same exception again", [BUG_TWICE, BUG_TWICE], True, BUG, Action.stop),
        ("again after another one", [BUG_TWICE, "!killed", BUG_TWICE], True, BUG, Action.stop),
        ("other exceptions", ["!a", "!b", BUG_TWICE], True, BUG, Action.restart),
        ("the same with a newer checkpoint in between", [BUG_TWICE, "5", BUG_TWICE], True, BUG, Action.stop),
        (
            "the same line at another step",
            ["!KeyError@train.py:3:step5", "5", BUG_TWICE],
            True,
            BUG,
            Action.restart,
        ),
        (
            "the same with a newer checkpoint in between, after another failure",
            ["!a", BUG_TWICE, "5", BUG_TWICE],
            True,
            BUG,
            Action.stop,
        ),
        (
            "the same with a newer checkpoint long ago",
            [BUG_TWICE, "5", BUG_TWICE, BUG_TWICE],
            True,
            BUG,
            Action.stop,
        ),
        ("the first start fails", [f"!{NO_START.signature}"], False, NO_START, Action.restart),
        ("the first start fails twice", [f"!{NO_START.signature}"] * 2, False, NO_START, Action.stop),
        ("it fails at another line", ["!x", f"!{NO_START.signature}"], False, NO_START, Action.restart),
        ("after a step", [f"!{NO_START.signature}"], True, NO_START, Action.restart),
        ("after a step, again", [f"!{NO_START.signature}"] * 2, True, NO_START, Action.restart),
        ("after a step, a third time", [f"!{NO_START.signature}"] * 3, True, NO_START, Action.stop),
        ("killed before the first step", ["!killed"], False, KILLED, Action.restart),
    ],
)
def test_decisions(why: str, story: list[str], trained: bool, what: Verdict, action: Action) -> None:
    """The table of decisions, with the default budget of three."""
    decision = decide(history(story, trained=trained), what, Budget(), stopping=False)
    assert decision.action is action, why
    assert decision.reason


def test_nothing_is_restarted_after_a_stop_request() -> None:
    """No kind of failure is restarted."""
    decision = decide(history(["!killed"]), KILLED, Budget(), stopping=True)
    assert decision.action is Action.stop
    assert "stop" in decision.reason


@pytest.mark.parametrize("failures", [0, 1, 5])
def test_the_budget_is_the_number_of_failures_recovered(failures: int) -> None:
    """The next failure in a row ends the run."""
    budget = Budget(failures_without_progress=failures)
    allowed = decide(history(["!killed"] * failures), KILLED, budget, stopping=False) if failures else None
    assert allowed is None or allowed.action is Action.restart
    assert decide(history(["!killed"] * (failures + 1)), KILLED, budget, stopping=False).action is Action.stop


def test_the_reason_to_give_up_contains_the_numbers() -> None:
    """The number of failures and the budget."""
    reason = decide(history(["!killed"] * 4), KILLED, Budget(), stopping=False).reason
    assert "4 failures" in reason
    assert "budget 3" in reason


def test_one_failure_is_not_given_as_several() -> None:
    """Whoever allows no restart reads the sentence after the first failure."""
    reason = decide(history(["!killed"]), KILLED, Budget(failures_without_progress=0), stopping=False).reason
    assert "1 failure in a row" in reason


def test_a_rank_that_fails_at_a_step_is_restarted_at_once() -> None:
    """Only a start that failed is delayed."""
    decision = decide(history(["!killed"]), KILLED, Budget(), stopping=False)
    assert decision == Decision(action=Action.restart, reason="from the checkpoint that rank 0 chooses")
    assert decision.delay_seconds == 0.0
    assert not decision.patient


def test_the_reason_to_give_up_a_repeated_failure_tells_a_start_from_a_step() -> None:
    """The reader looks for the error in another place."""
    start = decide(history([f"!{NO_START.signature}"] * 3), NO_START, Budget(), stopping=False)
    assert "when the script started" in start.reason
    step = decide(history([BUG_TWICE, BUG_TWICE]), BUG, Budget(), stopping=False)
    assert "at the same step" in step.reason


def test_a_negative_budget_is_refused() -> None:
    """The error is one that the user can correct."""
    with pytest.raises(ConfigError, match="-1"):
        Budget(failures_without_progress=-1)


def test_actions_are_the_documented_words() -> None:
    """They appear in journals; those that restart are known."""
    expected = "restart restart_from_earlier_checkpoint restart_with_plan_change quarantine_batch checkpoint_and_stop stop"
    assert [str(action) for action in Action] == expected.split()
    assert Action.stop not in RESTARTS
    assert Action.checkpoint_and_stop not in RESTARTS


def test_an_uninterruptible_rank_is_decided_like_any_other() -> None:
    """Whether it can be killed is known only later; the same budget limits both."""
    stuck = replace(KILLED, uninterruptible=True)
    for story in (["!killed"], ["!killed"] * 4):
        expected = decide(history(story), KILLED, Budget(), stopping=False)
        assert decide(history(story), stuck, Budget(), stopping=False) == expected


def test_only_failures_since_the_last_progress_count_as_earlier_ones() -> None:
    """The same signature before the newest checkpoint is another incident; every one after it is compared."""
    old = [BUG_TWICE, "5", "!a", BUG_TWICE]
    assert decide(history(old), BUG, Budget(), stopping=False).action is Action.restart
    assert (
        decide(history([BUG_TWICE, "5", "!a", "!b", BUG_TWICE]), BUG, Budget(), stopping=False).action
        is Action.restart
    )
    for story in (["5", BUG_TWICE, "!a", "!b", BUG_TWICE], ["5", "!a", BUG_TWICE, "!b", BUG_TWICE]):
        assert (
            decide(history(story), BUG, Budget(failures_without_progress=9), stopping=False).action
            is Action.stop
        )


def test_signatures_are_compared_for_equality_only() -> None:
    """Their order means nothing: a signature that sorts before or after is another failure."""
    for other in ("!A@train.py:1:step7", "!Z@train.py:1:step7"):
        decision = decide(history([other, "!x", BUG_TWICE]), BUG, Budget(), stopping=False)
        assert decision.action is Action.restart


def test_an_error_that_no_restart_can_help_ends_the_run_at_once() -> None:
    """Also after progress: the code cannot be compiled, or the script refuses its arguments."""
    final = replace(NO_START, final="the code cannot be compiled")
    for trained in (False, True):
        decision = decide(
            history([f"!{NO_START.signature}"], trained=trained), final, Budget(), stopping=False
        )
        assert decision.action is Action.stop
        assert "cannot be compiled" in decision.reason


def starts(
    *, seconds: float, budget: int = 3, origin: Origin = Origin.network, trained: bool = True
) -> list[Decision]:
    """Decide on starts that fail after a kill, each after the delay decided before and 2 s, for a number of seconds."""
    made = history(["!killed"], trained=trained)
    made.apply({"event": "action", "action": "restart"})
    decisions: list[Decision] = []
    at, number = 1000.0, 0
    while at < 1000.0 + seconds:
        number += 1
        what = replace(NO_START, origin=origin, signature=f"ConnectionError@hub.py:{number % 2}:step0")
        made.apply({"event": "attempt_started", "attempt": number, "time": at})
        made.apply(
            {"event": "incident", "cause": "startup_failure", "step": 0, "signature": what.signature, "starting": True,
             "failed_at": at, "time": at}
        )  # fmt: skip
        decision = decide(made, what, Budget(failures_without_progress=budget), stopping=False)
        made.apply({"event": "action", "action": str(decision.action), "patient": decision.patient})
        decisions.append(decision)
        if decision.action is Action.stop:
            break
        at += 2.0 + decision.delay_seconds
    assert not trained or budget == 0 or made.failures_without_progress <= 2
    return decisions


@pytest.mark.parametrize("origin", [Origin.network, Origin.files])
def test_a_start_that_fails_on_files_or_the_network_is_tried_for_ten_minutes(origin: Origin) -> None:
    """With growing delays, whatever the restart budget; then the run ends."""
    decisions = starts(seconds=3000.0, origin=origin)
    assert decisions[-1].action is Action.stop
    assert "could not start for 10 min" in decisions[-1].reason
    delays = [decision.delay_seconds for decision in decisions[:-1]]
    assert delays[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(delays[6:]) == {30.0}
    assert sum(delays) + 2.0 * len(delays) >= 600.0


def test_the_hub_is_away_for_20_seconds_or_for_9_minutes() -> None:
    """The run is still there."""
    for seconds in (20.0, 540.0):
        assert {decision.action for decision in starts(seconds=seconds)} == {Action.restart}


def test_a_start_that_takes_minutes_to_fail_is_tried_more_than_once() -> None:
    """A download with long timeouts has not had its chances after one try."""
    made = history([])
    for at in (0.0, 700.0, 1400.0):
        made.apply({"event": "incident", "cause": "x", "starting": True, "failed_at": at, "signature": "s"})
        decision = decide(made, replace(NO_START, origin=Origin.files), Budget(), stopping=False)
        assert decision.action is Action.restart
        made.apply({"event": "action", "action": "restart", "patient": decision.patient})


def fourth_try(seconds: float) -> Decision:
    """Decide on the fourth failed start in a row, a number of seconds after the first."""
    made = history([])
    for at in (0.0, 100.0, 200.0, seconds):
        made.apply(
            {"event": "incident", "cause": "x", "starting": True, "failed_at": 5000.0 + at, "signature": "s"}
        )
        decision = decide(made, replace(NO_START, origin=Origin.files), Budget(), stopping=False)
        made.apply({"event": "action", "action": str(decision.action), "patient": decision.patient})
    return decision


def test_the_fourth_try_ends_the_run_from_ten_minutes_on() -> None:
    """And not a second earlier."""
    assert fourth_try(599.5).action is Action.restart
    assert fourth_try(600.0).action is Action.stop


def test_the_reason_of_a_patient_try_says_from_where_and_how_long() -> None:
    """The run has trained, so it does not start from the beginning although its calls are not known here."""
    reason = fourth_try(300.0).reason
    assert reason.startswith("from the checkpoint that rank 0 chooses, in 8 s")
    assert "10 min" in reason


def test_a_budget_of_one_waits_for_a_hub_as_well() -> None:
    """Only `--max-restarts 0` restarts nothing."""
    assert {decision.action for decision in starts(seconds=60.0, budget=1)} == {Action.restart}


def test_nobody_waits_for_a_hub_without_progress_or_budget() -> None:
    """A run that has nothing to lose reports a wrong model name soon; `--max-restarts 0` restarts nothing."""
    assert [decision.action for decision in starts(seconds=3000.0, trained=False)][-1] is Action.stop
    assert len(starts(seconds=3000.0, trained=False)) <= 3
    assert [decision.action for decision in starts(seconds=3000.0, budget=0)] == [Action.stop]


def test_a_connection_that_fails_before_the_attempts_first_step_is_tried_patiently_too() -> None:
    """A data set that is streamed fails inside `train()`. After a step of the attempt, it is a failure of that step."""
    lost = verdict(cause=Cause.exception, signature="s", deterministic=True, origin=Origin.network)
    story = history(["!s", "!s", "!s"])
    story.apply({"event": "attempt_started", "attempt": 3})
    assert decide(story, lost, Budget(), stopping=False).patient
    story.apply({"event": "step_committed", "step": 8, "train_call": 1})
    assert decide(story, lost, Budget(), stopping=False).action is Action.stop


@pytest.mark.parametrize("origin", [origin for origin in Origin if origin is not Origin.network])
def test_only_connections_are_tried_patiently_inside_train(origin: Origin) -> None:
    """A file that is missing there will be missing again."""
    lost = verdict(cause=Cause.exception, signature="s", deterministic=True, origin=Origin.network)
    story = history(["!s"])
    story.apply({"event": "attempt_started", "attempt": 1})
    assert decide(story, lost, Budget(), stopping=False).patient
    decision = decide(story, replace(lost, origin=origin), Budget(), stopping=False)
    assert decision.action is Action.restart
    assert not decision.patient


def test_decisions_and_budgets_are_immutable() -> None:
    """What was journaled cannot change afterwards."""
    with pytest.raises(FrozenInstanceError):
        Budget().failures_without_progress = 9  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        decide(history(["!killed"]), KILLED, Budget(), stopping=False).reason = ""  # type: ignore[misc]


@pytest.mark.parametrize(("hangs", "action"), [(1, Action.restart), (2, Action.restart), (3, Action.stop)])
def test_a_reward_whose_time_limit_expires_again_is_moved_before_the_run_is_given_up(
    hangs: int, action: Action
) -> None:
    """The next attempt differs, so that the same exception again need not repeat; if it does, the run ends."""
    hung = {"file": "train.py", "function": "judge"}
    failure = {
        "event": "incident",
        "cause": "exception",
        "step": 7,
        "signature": BUG.signature,
        "failed_reward": hung,
    }
    events: list[dict[str, object]] = [failure, failure, {"event": "reward_moved", **hung}, failure]
    replayed = History.of(events[:hangs] if hangs < 3 else events)
    assert decide(replayed, BUG, Budget(), stopping=False).action is action


def test_without_a_budget_no_reward_is_moved() -> None:
    hung = {"file": "train.py", "function": "judge"}
    failure = {
        "event": "incident",
        "cause": "exception",
        "step": 7,
        "signature": BUG.signature,
        "failed_reward": hung,
    }
    budget = Budget(failures_without_progress=0)
    assert decide(History.of([failure, failure]), BUG, budget, stopping=False).action is Action.stop


@pytest.mark.parametrize(
    ("why", "story", "what", "prompts", "action"),
    [
        ("first failure", [BUG_TWICE], BUG, 4, Action.restart),
        ("the same again", [BUG_TWICE, BUG_TWICE], BUG, 4, Action.quarantine_batch),
        ("prompts not known", [BUG_TWICE, BUG_TWICE], BUG, 0, Action.stop),
        ("a hang again", [f"!{STALL.signature}"] * 2, STALL, 4, Action.quarantine_batch),
        (
            "a reward that hangs again",
            [f"!{SLOW_JUDGE.signature}"] * 2,
            SLOW_JUDGE,
            4,
            Action.quarantine_batch,
        ),
        ("a hang again, prompts not known", [f"!{STALL.signature}"] * 2, STALL, 0, Action.restart),
        ("kills may be anyone's", ["!killed", "!killed"], KILLED, 4, Action.restart),
        (
            "ranks that disagree",
            [BUG_TWICE, BUG_TWICE],
            replace(BUG, cause=Cause.collective_mismatch),
            4,
            Action.stop,
        ),
    ],
)
def test_prompts_leave_where_the_run_would_be_given_up(
    why: str, story: Sequence[str], what: Verdict, prompts: int, action: Action
) -> None:
    """A failure that a restart only repeats may be that of a prompt; no other changes the training."""
    for phase, text in (("generate", "generation has failed twice"), ("reward", "rewards have failed twice")):
        here = replace(what, phase=phase)
        decision = decide(history(story), here, Budget(), stopping=False, prompts=prompts)
        assert decision.action is action, why
        assert (text in decision.reason) == (action is Action.quarantine_batch)
    elsewhere = replace(what, phase="forward_backward")
    decision = decide(history(story), elsewhere, Budget(), stopping=False, prompts=prompts)
    assert decision.action is not Action.quarantine_batch


def test_no_restart_is_allowed_for_prompts_either() -> None:
    """With `--max-restarts 0`."""
    budget, bug = Budget(failures_without_progress=0), replace(BUG, phase="generate")
    assert (
        decide(history([BUG_TWICE, BUG_TWICE]), bug, budget, stopping=False, prompts=4).action is Action.stop
    )
