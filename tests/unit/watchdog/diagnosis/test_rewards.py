"""Reward functions are found by the names of the code that calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_run.runtime.rank.rewards import served
from grpo_run.watchdog.diagnosis._rewards import CALLER_FILE, CALLERS, raised_reward


def test_the_frames_are_those_of_the_wrapper() -> None:
    """The names that are looked for are the names of the code that calls reward functions."""
    methods: list[Callable[..., Any]] = [served.call_in_rank, served.Rewards._until_deadline]
    assert {method.__name__ for method in methods} | {"served_async"} == CALLERS
    assert "async def served_async(" in Path(served.__file__).read_text()
    assert served.__file__.endswith("/runtime/rank/rewards/served.py")
    assert CALLER_FILE.endswith("/runtime/rank/rewards/served.py")
    assert raised_reward(None, "reward") is None
