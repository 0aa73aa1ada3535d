"""A reward or a prompt that fails again leaves before the run is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.builders.runtime.failure_stories import BUG, BUG_TWICE, SLOW_JUDGE, STALL, history

from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide
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
