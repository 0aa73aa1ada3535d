"""A reward or a prompt that fails again leaves before the run is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.builders.runtime.failure_stories import BUG, BUG_TWICE, KILLED, SLOW_JUDGE, STALL, history
from support.journal import as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Verdict

HUNG = {"file": "train.py", "function": "judge"}
FAILURE: dict[str, object] = {
    "event": "incident",
    "cause": "exception",
    "step": 7,
    "signature": BUG.signature,
    "failed_reward": HUNG,
}
"""A reward function whose time limit has expired."""


@pytest.mark.parametrize(("hangs", "action"), [(1, Action.restart), (2, Action.restart), (3, Action.stop)])
def test_a_reward_whose_time_limit_expires_again_is_moved_before_the_run_is_given_up(
    hangs: int, action: Action
) -> None:
    """The next attempt differs, so that the same exception again need not repeat; if it does, the run
    ends.
    """
    events: list[dict[str, object]] = [FAILURE, FAILURE, {"event": "reward_moved", **HUNG}, FAILURE]
    replayed = History.of(as_events(events[:hangs] if hangs < 3 else events))
    assert decide(replayed, BUG, Budget(), stopping=False).action is action


def test_without_a_budget_no_reward_is_moved() -> None:
    budget = Budget(failures_without_progress=0)
    assert (
        decide(History.of(as_events([FAILURE, FAILURE])), BUG, budget, stopping=False).action is Action.stop
    )


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
