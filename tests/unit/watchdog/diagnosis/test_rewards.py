"""Which reward function a rank has hung in, or has raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.rank.rewards import served
from grpo_run.watchdog.diagnosis import rewards
from grpo_run.watchdog.diagnosis.rewards import CALLER_FILE, EVERY_FUNCTION, hung_reward, raised_reward
from grpo_run.watchdog.evidence.stacks import Frame, Stack
from grpo_run.watchdog.observation import Phase, RankError
from grpo_run.watchdog.verdict import RewardFunction

JUDGE = RewardFunction(file="/me/train.py", function="judge")


def stack(*frames: tuple[str, str], main: bool = True) -> Stack:
    """A stack, innermost first."""
    return Stack("MainThread", tuple(Frame(file, 1, function) for file, function in frames), main)


IN_JUDGE = stack(
    ("/lib/re.py", "match"), ("/me/train.py", "parse"), ("/me/train.py", "judge"),
    (CALLER_FILE, "call_in_rank"),
    (CALLER_FILE, "served"), ("/site-packages/trl/trainer/grpo_trainer.py", "_calculate_rewards"),
)  # fmt: skip
AWAITS = stack(
    ("/lib/threading.py", "wait"), ("/lib/python3.11/concurrent/futures/_base.py", "result"),
    ("/site-packages/trl/trainer/grpo_trainer.py", "_calculate_rewards"),
)  # fmt: skip
LOOP = stack(
    ("/me/train.py", "judge"), (CALLER_FILE, "_until_deadline"), (CALLER_FILE, "served_async"), main=False
)
GATHERS = stack(
    ("/site-packages/torch/distributed/distributed_c10d.py", "all_gather"), ("/me/train.py", "<module>")
)


@pytest.mark.parametrize(
    ("stacks", "found"),
    [
        ([[IN_JUDGE]], JUDGE),
        ([[AWAITS, LOOP]], JUDGE),
        ([[AWAITS]], EVERY_FUNCTION),
        ([[GATHERS]], None),
        ([[]], None),
        ([[IN_JUDGE], [IN_JUDGE]], JUDGE),
        ([[IN_JUDGE], [AWAITS]], None),
    ],
)
def test_the_function_is_the_one_that_our_frame_has_called(
    stacks: list[list[Stack]], found: RewardFunction | None
) -> None:
    assert hung_reward(stacks) == found


def error(kind: str, bases: tuple[str, ...], caller: str = CALLER_FILE) -> RankError:
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{caller}", line 9, in call_in_rank\n    return function(*args)\n'
        '  File "/me/train.py", line 3, in judge\n    wait()\n'
        f'  File "/lib/futures.py", line 3, in wait\n{kind}: 6 (of 8) futures unfinished\n'
    )
    return RankError(
        type=kind,
        message="6 (of 8) futures unfinished",
        traceback=text,
        location=None,
        wall_time=0.0,
        bases=bases,
    )


@pytest.mark.parametrize(
    ("raised", "phase", "found"),
    [
        (error("TimeoutError", ("builtins.TimeoutError", "builtins.OSError")), Phase.reward, JUDGE),
        (error("ReadTimeout", ("httpx.ReadTimeout", "httpx.TimeoutException")), Phase.reward, JUDGE),
        (error("APIError", ("openai.APITimeoutError",)), Phase.reward, JUDGE),
        (error("ValueError", ("builtins.ValueError",)), Phase.reward, replace(JUDGE, raised=True)),
        (error("TimeoutError", ("builtins.TimeoutError",)), Phase.generate, None),
        (error("TimeoutError", ("builtins.TimeoutError",), "/other.py"), Phase.reward, None),
        (None, Phase.reward, None),
    ],
)  # fmt: skip
def test_a_function_that_raises_is_found_and_an_expired_time_limit_is_a_hang(
    raised: RankError | None, phase: Phase, found: RewardFunction | None
) -> None:
    assert raised_reward(raised, phase.name) == found


def test_the_frames_are_those_of_the_wrapper() -> None:
    """The names that are looked for are the names of the code that calls reward functions."""
    methods: list[Callable[..., Any]] = [served.call_in_rank, served.Rewards._until_deadline]
    assert {method.__name__ for method in methods} | {"served_async"} == rewards.CALLERS
    assert "async def served_async(" in Path(served.__file__).read_text()
    assert served.__file__.endswith("/runtime/rank/rewards/served.py")
    assert CALLER_FILE.endswith("/runtime/rank/rewards/served.py")
