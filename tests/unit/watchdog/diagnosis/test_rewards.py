"""Reward functions are found by the names of the code that calls them."""

from __future__ import annotations

from grpo_run.runtime.rank.hooks import _reward_functions
from grpo_run.watchdog.diagnosis._rewards import CALLER, CALLER_FILE, raised_reward


def test_the_frames_are_those_of_the_wrapper() -> None:
    """The names that are looked for are the names of the code that calls reward functions."""
    assert _reward_functions.__file__ == CALLER_FILE
    makers = (_reward_functions._called, _reward_functions._called_async)
    assert {maker(print).__name__ for maker in makers} == {CALLER}
    assert raised_reward(None, "reward") is None
