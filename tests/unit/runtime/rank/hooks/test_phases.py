"""Wrappers mark a phase on the board and change nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.hooks._phases import callback_name, mark_callbacks, marked
from grpo_run.runtime.rank.step.step_vote import PhaseFingerprint
from grpo_run.runtime.upstream.patches import wrapped_methods
from grpo_run.watchdog.observation import Phase, Slot

Reading = Callable[[], Slot]


class Trainer:
    """An object with methods."""

    scale = 2

    def generate(self, count: int, *, extra: int = 0) -> int:
        """Generate."""
        if count < 0:
            raise ValueError(count)
        return count * self.scale + extra


def test_a_marked_method_keeps_its_name_and_result(slot: SlotWriter, reading: Reading) -> None:
    """Only the instance is changed, and only for the length of the block; a method that it lacks is skipped.
    The phase ends with the method, also if that raises, and counts in the fingerprint.
    """
    trainer, fingerprint = Trainer(), PhaseFingerprint()
    original = Trainer.generate
    mark = [marked(Phase.generate, slot, fingerprint)]
    slot.enter(Phase.data)
    with wrapped_methods(trainer, {"generate": mark, "_calculate_rewards": mark}):
        assert trainer.generate(3, extra=1) == 7
        assert fingerprint.take() != 0
        assert trainer.generate.__name__ == "generate"
        assert inspect.signature(trainer.generate) == inspect.signature(Trainer().generate)
        assert Trainer.generate is original
        assert not hasattr(trainer, "_calculate_rewards")
        with pytest.raises(ValueError, match="-1"):
            trainer.generate(-1)
        assert fingerprint.take() != 0
    assert vars(trainer) == {}
    assert reading().phase is Phase.data


def test_the_same_phases_give_the_same_fingerprint() -> None:
    """Other phases, or another order, give another fingerprint."""

    def fingerprint(*phases: Phase) -> int:
        made = PhaseFingerprint()
        for phase in phases:
            made.enter(phase)
        return made.take()

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


def test_a_fingerprint_fits_a_vote_and_is_reset_by_taking_it() -> None:
    """The vote reduces it and its negation as 64-bit integers; ranks compare the phases of each step."""
    fingerprint = PhaseFingerprint()
    for phase in [*Phase] * 20:
        fingerprint.enter(phase)
        assert 0 <= fingerprint.value < 2**32
    assert fingerprint.take() != 0
    assert fingerprint.take() == 0


class Base:
    """Replaces transformers' `TrainerCallback`."""

    def on_step_end(self, args: Any, **kwargs: Any) -> Any:
        """Do nothing."""

    def on_save(self, args: Any, **kwargs: Any) -> Any:
        """Do nothing."""


class Upload(Base):
    """A user's callback."""

    def __init__(self, seen: Callable[[], Any]) -> None:
        self._seen = seen
        self.error: Exception | None = None

    def on_save(self, args: Any, **kwargs: Any) -> Any:
        """Upload."""
        if self.error is not None:
            raise self.error
        return self._seen(), args, kwargs


def test_a_users_callback_is_marked_by_class_and_event(slot: SlotWriter, reading: Reading) -> None:
    """Inside the phase that calls it, which continues afterwards. Arguments, result and exception are
    unchanged. Nested classes keep their outer class, which tells them apart.
    """

    class Local(Base):
        class Inner(Base):
            pass

    callback = Upload(lambda: [open.key for open in reading().phases])
    slot.replace(Phase.checkpoint)
    with mark_callbacks(SimpleNamespace(callbacks=[callback]), Base, slot):
        assert callback.on_save(1, model=2) == ([Phase.checkpoint, "Upload.on_save"], 1, {"model": 2})
        callback.error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            callback.on_save(1)
    assert [open.phase for open in reading().phases] == [Phase.checkpoint]
    assert callback_name(Local(), "on_save") == "Local.on_save"
    assert callback_name(Local.Inner(), "on_log") == "Local.Inner.on_log"


def test_only_overridden_events_of_user_callbacks_are_marked(slot: SlotWriter) -> None:
    """Other events are frequent, and the libraries' own callbacks return quickly."""
    library = type("ProgressCallback", (Upload,), {"__module__": "transformers.trainer_callback"})(
        lambda: None
    )
    early = type("EarlyStopping", (Upload,), {"__module__": "transformers.trainer_callback"})(lambda: None)
    user = Upload(lambda: None)
    with mark_callbacks(SimpleNamespace(callbacks=[library, early, user]), Base, slot):
        assert "on_save" in vars(early), "it decides by a metric"
        assert "on_step_end" not in vars(user)
        assert "on_save" in vars(user)
        assert "on_save" not in vars(library)


def test_marks_are_removed_from_callbacks(slot: SlotWriter, reading: Reading) -> None:
    """The same callback may serve the next `train()` call. Methods set on the instance are not touched."""
    callback, own = Upload(lambda: reading().phase), Upload(lambda: None)
    own.on_save = lambda args, **kwargs: "own"  # type: ignore[method-assign]
    slot.replace(Phase.data)
    handler = SimpleNamespace(callbacks=[callback, own])
    for _ in range(2):
        with mark_callbacks(handler, Base, slot):
            handler.callbacks.reverse()  # the list belongs to the trainer and may change
            assert callback.on_save(1)[0] is Phase.callback
        assert "on_save" not in vars(callback)
        assert callback.on_save(1)[0] is Phase.data
    assert own.on_save(1) == "own"
