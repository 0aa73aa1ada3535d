"""Wrappers that mark a phase and change nothing else."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import SlotWriter
from grpo_run.trainers.hooks.phases import PhaseFingerprint, mark_callbacks, mark_method, mark_reward
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

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self.value] * len(completions)


class AsyncJudge:
    """One that is to be awaited."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)


class Module:
    """Looks like a reward model."""

    def forward(self) -> None: ...

    def __call__(self) -> None: ...


def test_a_reward_keeps_its_name_and_signature(slot: SlotWriter) -> None:
    """TRL makes a metric's name of the one and looks at the other."""
    wrapped = mark_reward(length_reward, slot)
    assert wrapped.__name__ == "length_reward"
    assert inspect.signature(wrapped) == inspect.signature(length_reward)
    assert not inspect.iscoroutinefunction(wrapped)


def test_a_reward_gets_what_it_was_given_and_returns_what_it_returned(slot: SlotWriter) -> None:
    """Arguments and result pass through as they are."""
    given: list[Any] = []
    answer = [1.0, None]

    def reward(*args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        return answer

    assert mark_reward(reward, slot)("a", completions=["b"]) is answer
    assert given == [(("a",), {"completions": ["b"]})]


def test_a_reward_marks_its_phase_and_counts(slot: SlotWriter, reading: Reading) -> None:
    """While it runs; what it scored afterwards."""
    during: list[Phase | None] = []

    def reward(completions: list[str]) -> list[float]:
        during.append(reading().phase)
        return [0.0] * len(completions)

    slot.enter(Phase.score)
    mark_reward(reward, slot)(["a", "b", "c"])
    assert during == [Phase.reward]
    assert reading().phase is Phase.score
    assert reading().rewards_scored == 3


@pytest.mark.parametrize(("counts", "tokens"), [(True, 5), (False, 0)])
def test_tokens_are_counted_by_one_of_several_rewards(slot: SlotWriter, counts: bool, tokens: int) -> None:
    """All of them see the same completions."""
    wrapped = mark_reward(length_reward, slot, counts_tokens=counts)
    wrapped(completions=["a", "b"], completion_ids=[[1, 2], [3, 4, 5]])
    wrapped(completions=["a"])
    assert (slot.tokens_generated, slot.rewards_scored) == (tokens, 3)


def test_a_rewards_exception_passes_through_and_closes_the_phase(slot: SlotWriter, reading: Reading) -> None:
    """The same object; the phase does not stay open."""
    error = KeyError("reward")

    def reward() -> None:
        raise error

    slot.enter(Phase.score)
    with pytest.raises(KeyError) as caught:
        mark_reward(reward, slot)()
    assert caught.value is error
    assert reading().phase is Phase.score


@pytest.mark.parametrize("result", [None, 1.0, iter([1.0])])
def test_a_result_without_length_is_not_counted(slot: SlotWriter, result: Any) -> None:
    """Nor refused: that is TRL's to do."""
    assert mark_reward(lambda: result, slot)() is result
    assert slot.rewards_scored == 0


def test_a_coroutine_stays_one(slot: SlotWriter) -> None:
    """TRL gathers those; it counts too."""
    wrapped = mark_reward(slow_reward, slot)
    assert inspect.iscoroutinefunction(wrapped)
    assert wrapped.__name__ == "slow_reward"
    assert asyncio.run(wrapped(["a", "b"])) == [1.0, 1.0]
    assert slot.rewards_scored == 2


def test_a_callable_object_is_wrapped(slot: SlotWriter) -> None:
    """With the name of its class, and with its state as it is when it is called."""
    judge = Judge(1.0)
    wrapped = mark_reward(judge, slot)
    judge.value = 3.0
    assert wrapped(["a"]) == [3.0]
    assert wrapped.__name__ == "Judge"
    assert not inspect.iscoroutinefunction(wrapped)


def test_a_callable_object_to_be_awaited_stays_one(slot: SlotWriter) -> None:
    """Its `__call__` is the coroutine."""
    wrapped = mark_reward(AsyncJudge(), slot)
    assert inspect.iscoroutinefunction(wrapped)
    assert asyncio.run(wrapped(["a"])) == [2.0]


def test_a_partial_function_is_wrapped(slot: SlotWriter) -> None:
    """They have no name of their own."""
    wrapped = mark_reward(functools.partial(length_reward, extra=1), slot)
    assert wrapped(["ab"]) == [2.0]
    assert wrapped.__name__


@pytest.mark.parametrize("model", [Module(), Module])
def test_a_reward_model_is_left_alone(slot: SlotWriter, model: Any) -> None:
    """TRL tells modules from functions and moves them to devices."""
    assert mark_reward(model, slot) is model


def test_wrapping_twice_wraps_once(slot: SlotWriter) -> None:
    """A second `train()` call must not count twice."""
    once = mark_reward(length_reward, slot)
    assert mark_reward(once, slot) is once


class Trainer:
    """Something with methods."""

    scale = 2

    def generate(self, count: int, *, extra: int = 0) -> int:
        """Generates."""
        if count < 0:
            raise ValueError(count)
        return count * self.scale + extra


def test_a_method_keeps_its_name_and_its_result(slot: SlotWriter) -> None:
    """Of this instance only; the class stays as it was."""
    trainer, path = Trainer(), PhaseFingerprint()
    original = Trainer.generate
    with mark_method(trainer, "generate", Phase.generate, slot, path):
        assert trainer.generate(3, extra=1) == 7
        assert trainer.generate.__name__ == "generate"
        assert inspect.signature(trainer.generate) == inspect.signature(Trainer().generate)
        assert Trainer.generate is original
    assert vars(trainer) == {}


def test_a_methods_phase_is_closed_after_an_exception(slot: SlotWriter, reading: Reading) -> None:
    """The exception itself passes."""
    trainer = Trainer()
    slot.enter(Phase.data)
    with (
        mark_method(trainer, "generate", Phase.generate, slot, PhaseFingerprint()),
        pytest.raises(ValueError, match="-1"),
    ):
        trainer.generate(-1)
    assert reading().phase is Phase.data


def test_a_method_that_is_not_there_is_passed_over(slot: SlotWriter) -> None:
    """SFT's trainer has no rewards."""
    trainer = Trainer()
    with mark_method(trainer, "_calculate_rewards", Phase.reward, slot, PhaseFingerprint()):
        assert not hasattr(trainer, "_calculate_rewards")


def test_the_same_phases_give_the_same_fingerprint() -> None:
    """And other phases, or another order, another one."""

    def fingerprint(*phases: Phase) -> int:
        path = PhaseFingerprint()
        for phase in phases:
            path.enter(phase)
        return path.take()

    ranks = {fingerprint(Phase.generate, Phase.reward) for _ in range(4)}
    assert len(ranks) == 1
    others = {
        fingerprint(Phase.reward, Phase.generate),
        fingerprint(Phase.generate),
        fingerprint(Phase.generate, Phase.reward, Phase.eval),
        fingerprint(Phase.generate, Phase.generate, Phase.reward),
        fingerprint(),
    }
    assert len(others | ranks) == 6


def test_a_fingerprint_starts_over_at_each_vote() -> None:
    """So that ranks agree step by step."""
    path = PhaseFingerprint()
    path.enter(Phase.eval)
    assert path.take() != 0
    assert path.take() == 0


def test_a_fingerprint_fits_a_ballot() -> None:
    """It is reduced as a 64-bit number, with its negation."""
    path = PhaseFingerprint()
    for phase in [*Phase] * 20:
        path.enter(phase)
        assert 0 <= path.value < 2**32


def test_a_marked_method_leaves_its_trace(slot: SlotWriter) -> None:
    """Entering is what counts, also when it raises: a rank that tried took another path."""
    path, trainer = PhaseFingerprint(), Trainer()
    with mark_method(trainer, "generate", Phase.generate, slot, path):
        trainer.generate(1)
    assert path.take() != 0


class Base:
    """Stands for transformers' `TrainerCallback`."""

    def on_step_end(self, args: Any, **kwargs: Any) -> Any:
        """Does nothing."""

    def on_save(self, args: Any, **kwargs: Any) -> Any:
        """Does nothing."""


class Upload(Base):
    """A user's callback."""

    def __init__(self, seen: Callable[[], Any]) -> None:
        self._seen = seen
        self.error: Exception | None = None

    def on_save(self, args: Any, **kwargs: Any) -> Any:
        """Takes a while."""
        if self.error is not None:
            raise self.error
        return self._seen(), args, kwargs


def test_a_users_callback_runs_in_the_scripts_own_time(slot: SlotWriter, reading: Reading) -> None:
    """Inside whatever phase it is called from, which goes on afterwards; arguments and control pass through."""
    callback = Upload(lambda: [open.phase for open in reading().phases])
    slot.replace(Phase.checkpoint)
    with mark_callbacks(SimpleNamespace(callbacks=[callback]), Base, slot):
        assert callback.on_save(1, model=2) == ([Phase.checkpoint, Phase.idle], 1, {"model": 2})
    assert [open.phase for open in reading().phases] == [Phase.checkpoint]


def test_a_callback_that_fails_leaves_its_phase(slot: SlotWriter, reading: Reading) -> None:
    """Its error goes on."""
    callback = Upload(reading)
    callback.error = ZeroDivisionError()
    slot.replace(Phase.checkpoint)
    handler = SimpleNamespace(callbacks=[callback])
    with mark_callbacks(handler, Base, slot), pytest.raises(ZeroDivisionError):
        callback.on_save(1)
    assert [open.phase for open in reading().phases] == [Phase.checkpoint]


def test_only_what_a_callback_overrides_is_marked(slot: SlotWriter) -> None:
    """Events it does not care for come a thousand times a second; libraries' own callbacks are quick."""
    library = type("Flow", (Upload,), {"__module__": "transformers.trainer_callback"})(lambda: None)
    user = Upload(lambda: None)
    with mark_callbacks(SimpleNamespace(callbacks=[library, user]), Base, slot):
        assert "on_step_end" not in vars(user)
        assert "on_save" in vars(user)
        assert "on_save" not in vars(library)


def test_a_callbacks_mark_comes_off(slot: SlotWriter, reading: Reading) -> None:
    """The same callback serves the next `train()` call; what was its own attribute before is left alone."""
    callback, own = Upload(lambda: reading().phase), Upload(lambda: None)
    own.on_save = lambda args, **kwargs: "own"  # type: ignore[method-assign]
    slot.replace(Phase.data)
    handler = SimpleNamespace(callbacks=[callback, own])
    for _ in range(2):
        with mark_callbacks(handler, Base, slot):
            handler.callbacks.reverse()  # the list belongs to the trainer and may change
            assert callback.on_save(1)[0] is Phase.idle
        assert "on_save" not in vars(callback)
        assert callback.on_save(1)[0] is Phase.data
    assert own.on_save(1) == "own"
