"""A reward or a prompt that fails again leaves before the run is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.builders.runtime.failure_stories import BUG, BUG_TWICE, SLOW_JUDGE, STALL, history

from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide
from grpo_run.watchdog.observation import Alarm
from grpo_run.watchdog.verdict import Verdict

MOVE = Decision(action=Action.restart, reason="a reward function is moved")


@pytest.mark.parametrize("failures", [1, 2])
def test_what_is_answered_at_once_need_not_repeat(failures: int) -> None:
    """The next attempt differs, so that the same exception again need not repeat either."""
    found = decide(history([BUG_TWICE] * failures), BUG, Budget(), stopping=False, answer=MOVE, at_once=True)
    assert found is MOVE


ANSWER = Decision(action="answer_of_a_feature", reason="it differs")


@pytest.mark.parametrize(
    ("why", "story", "what", "taken"),
    [
        ("first failure", [BUG_TWICE], BUG, False),
        ("the same again", [BUG_TWICE, BUG_TWICE], BUG, True),
        ("a hang again", [f"!{STALL.signature}"] * 2, STALL, True),
        ("a reward that hangs again", [f"!{SLOW_JUDGE.signature}"] * 2, SLOW_JUDGE, True),
    ],
)
def test_a_feature_is_followed_where_a_restart_would_only_repeat(
    why: str, story: Sequence[str], what: Verdict, taken: bool
) -> None:
    """It may change the training, so a failure that need not be its own is restarted without it."""
    decision = decide(history(story), what, Budget(), stopping=False, answer=ANSWER)
    assert (decision is ANSWER) is taken, why
    assert decide(history(story), what, Budget(), stopping=False) is not ANSWER


def test_no_restart_is_allowed_for_a_feature_either() -> None:
    """With `--max-restarts 0`."""
    budget, bug = Budget(failures_without_progress=0), replace(BUG, phase="generate")
    assert (
        decide(history([BUG_TWICE, BUG_TWICE]), bug, budget, stopping=False, answer=ANSWER).action
        is Action.stop
    )


ALARM = replace(BUG, alarm=Alarm(cause="nonfinite", step=7, sentence="It is wrong.", signature=BUG.signature))
BACK = Decision(action="roll_back", reason="to before the onset", before_step=5)
STOP = Decision(action=Action.stop, reason="the guard ends the run")


@pytest.mark.parametrize(
    ("failures", "answer", "can_go_back", "reason"),
    [
        (1, BACK, True, BACK.reason),
        (1, BACK, False, "no checkpoint from before the onset at step 5 is left"),
        (2, BACK, True, "2 failures in a row without a newer checkpoint (budget 1)"),
        (2, STOP, False, STOP.reason),
    ],
)
def test_an_answer_to_an_alarm_restarts_within_the_budget_and_only_where_it_can_go_back(
    failures: int, answer: Decision, can_go_back: bool, reason: str
) -> None:
    """A stop needs neither."""
    found = decide(
        history([BUG_TWICE] * failures), ALARM, Budget(failures_without_progress=1), stopping=False,
        answer=answer, can_go_back=can_go_back,
    )  # fmt: skip
    assert found.reason == reason


def test_a_budget_of_one_answers_what_repeats() -> None:
    """The second failure is the first one that can repeat."""
    budget = Budget(failures_without_progress=1)
    assert decide(history([BUG_TWICE] * 2), BUG, budget, stopping=False, answer=ANSWER) is ANSWER
