"""Wrapped reward functions mark their phase, count, and change nothing else."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.hooks._reward_functions import rewards_wrapped, wrapped
from grpo_run.watchdog.observation import Phase, Slot

Reading = Callable[[], Slot]


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """A user's reward function."""
    return [float(len(text)) for text in completions]


async def slow_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """A user's asynchronous reward function."""
    await asyncio.sleep(0)
    return [1.0] * len(completions)


class Judge:
    """A user's callable object."""

    value = 1.0

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self.value] * len(completions)


class AsyncJudge:
    """A callable object whose `__call__` is a coroutine function."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)


class Module:
    """An object that looks like a reward model."""

    def forward(self) -> None: ...

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "rewards"),
    [
        (length_reward, "length_reward", [1.0, 2.0]),
        (slow_reward, "slow_reward", [1.0, 1.0]),
        (Judge(), "Judge", [1.0, 1.0]),
        (AsyncJudge(), "AsyncJudge", [2.0, 2.0]),
        (functools.partial(length_reward, extra=1), "partial", [1.0, 2.0]),
    ],
)
def test_a_reward_keeps_its_name_its_kind_and_its_signature(
    slot: SlotWriter, session: Any, function: Any, name: str, rewards: list[float]
) -> None:
    """TRL uses the name for a metric, inspects the signature, and gathers coroutines. An object's state is
    that of the moment; all completions are counted.
    """
    reward = wrapped(function, session)
    assert reward.__name__ == name
    assert inspect.signature(reward) == inspect.signature(function)
    assert inspect.iscoroutinefunction(reward) is (name in ("slow_reward", "AsyncJudge"))
    result: Any = reward(["a", "bc"])
    assert (asyncio.run(result) if inspect.iscoroutine(result) else result) == rewards
    assert slot.rewards_scored == 2
    if isinstance(function, Judge):
        function.value = 3.0
        assert reward(["a"]) == [3.0]
        function.value = 1.0


def test_a_reward_marks_its_phase_and_counts(slot: SlotWriter, session: Any, reading: Reading) -> None:
    """The phase is open while the function runs; its completions are counted afterwards."""
    during: list[Phase | None] = []

    def reward(completions: list[str]) -> list[float]:
        during.append(reading().phase)
        return [0.0] * len(completions)

    slot.enter(Phase.score)
    wrapped(reward, session)(["a", "b", "c"])
    assert during == [Phase.reward]
    assert reading().phase is Phase.score
    assert reading().rewards_scored == 3


def test_a_rewards_exception_closes_the_phase(slot: SlotWriter, session: Any, reading: Reading) -> None:
    """The same exception is raised."""
    error = KeyError("reward")

    def reward() -> None:
        raise error

    slot.enter(Phase.score)
    with pytest.raises(KeyError) as caught:
        wrapped(reward, session)()
    assert caught.value is error
    assert reading().phase is Phase.score


@pytest.mark.parametrize("result", [None, 1.0, iter([1.0])])
def test_a_result_without_length_is_not_counted(slot: SlotWriter, session: Any, result: Any) -> None:
    """TRL decides whether to reject it."""
    assert wrapped(lambda: result, session)() is result
    assert slot.rewards_scored == 0


@pytest.mark.parametrize("model", [Module(), Module])
def test_a_reward_model_or_a_marked_reward_is_not_wrapped(slot: SlotWriter, session: Any, model: Any) -> None:
    """TRL moves modules to devices. A second `train()` call must not count twice."""
    assert wrapped(model, session) is model
    once = wrapped(length_reward, session)
    assert wrapped(once, session) is once


def fails(completions: list[str]) -> None:
    """A user's reward function that raises."""
    raise ValueError


def test_calls_are_journaled_now_and_then_and_at_the_end(
    session: Any, events: Callable[[], list[dict[str, Any]]]
) -> None:
    """Also those that fail. A function that is wrapped by a call before counts on."""
    trainer = SimpleNamespace(reward_funcs=[length_reward, fails, Module()])
    for _ in range(2):
        with rewards_wrapped(trainer, session, ()):
            for _ in range(2):
                trainer.reward_funcs[0](["a"])
            with pytest.raises(ValueError, match=r"^$"):
                trainer.reward_funcs[1](["a"])
    found = [one for one in events() if one["event"] == "reward_latency"]
    assert [(one["function"], one["calls"], one["step"]) for one in found] == [
        ("length_reward", 1, 1), ("fails", 1, 1), ("length_reward", 2, 1),
        ("length_reward", 4, 1), ("fails", 2, 1),
    ]  # fmt: skip
    assert all(one["longest_seconds"] <= one["total_seconds"] for one in found)


def test_a_feature_may_call_something_in_place_of_a_function(session: Any) -> None:
    """The last one is the outermost; each is given what calls the function in the rank."""

    def add(function: Any, name: str, call: Any) -> Any:
        assert (function, name) == (length_reward, "length_reward")
        return lambda completions: [value + 1 for value in call(completions)]

    def double(function: Any, name: str, call: Any) -> Any:
        return lambda completions: [value * 2 for value in call(completions)]

    assert wrapped(length_reward, session, [add, double])(["a", "bc"]) == [4.0, 6.0]
