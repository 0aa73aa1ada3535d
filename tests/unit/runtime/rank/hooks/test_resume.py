"""A finished `train()` call is restored without training, and one that was over takes no further step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.rank.hooks._resume import RestoredCall, epochs_skipped

Events = Callable[[], list[dict[str, Any]]]


class EpochTrainer:
    """A trainer that runs one epoch at a time."""

    def __init__(self) -> None:
        self.control = SimpleNamespace(should_training_stop=False)
        self.state = SimpleNamespace(global_step=5, max_steps=5)

    def _run_epoch(self) -> str:
        """Run."""
        return "trained"


def test_skipping_training_takes_no_step() -> None:
    """The epoch ends at once, if the call is over by then. Afterwards the trainer trains again."""
    trainer = EpochTrainer()
    with epochs_skipped(trainer, lambda: trainer.state.global_step >= trainer.state.max_steps):
        trainer.state.max_steps = 6
        assert trainer._run_epoch() == "trained"
        assert not trainer.control.should_training_stop
        trainer.state.global_step = 6
        assert trainer._run_epoch() is None  # type: ignore[func-returns-value]
        assert trainer.control.should_training_stop
    assert trainer._run_epoch() == "trained"


class LoopTrainer:
    """A trainer whose epochs are a part of `train`, as before transformers 5.3."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.control = SimpleNamespace(should_training_stop=False)
        self.callback_handler = SimpleNamespace(on_epoch_begin=self._event, on_epoch_end=self._event)

    def _event(self, *args: Any) -> Any:
        self.called.append("event")
        return self.control

    def get_batch_samples(self, *args: Any) -> tuple[list[str], int]:
        """Return the batches of one step."""
        return ["batch"], 1

    def _maybe_log_save_evaluate(self, *args: Any) -> None:
        self.called.append("log, evaluate, save")

    def train(self) -> None:
        """Run epochs."""
        self.control = self.callback_handler.on_epoch_begin(None, None, self.control)
        random.random()  # an iterator of the data loader draws its seed
        batches, _ = self.get_batch_samples(None, 1, None)
        self.called += batches
        self.control = self.callback_handler.on_epoch_end(None, None, self.control)
        self._maybe_log_save_evaluate(None)


@pytest.mark.parametrize("over", [True, False])
def test_an_epoch_inside_a_loop_is_skipped_without_a_trace(over: bool) -> None:
    """No batch, no event, and the random numbers that follow are the same; a call that is not over trains."""
    trainer, before = LoopTrainer(), random.getstate()
    with epochs_skipped(trainer, lambda: over):
        trainer.train()
    assert trainer.called == ([] if over else ["event", "batch", "event", "log, evaluate, save"])
    assert trainer.control.should_training_stop is over
    assert (random.getstate() == before) is over
    trainer.called.clear()
    trainer.train()
    assert trainer.called == ["event", "batch", "event", "log, evaluate, save"]


@pytest.mark.parametrize(
    ("script_stopped", "step", "epoch_ended", "events"),
    [
        (True, 5, False, ["random state", "epoch end", "log, evaluate, save"]),
        (True, 5, True, []),
        (False, 9, False, ["random state", "epoch end", "log, evaluate, save"]),
        (False, 9, True, []),
        (False, 5, False, ["trained"]),
        (False, 5, True, ["trained"]),
    ],
)
def test_a_call_that_was_over_takes_no_step(
    session: Any, script_stopped: bool, step: int, epoch_ended: bool, events: list[str]
) -> None:
    """By the script or at its last step. What follows the step at the end of the epoch is made up for,
    once.
    """
    called: list[str] = []

    def on_epoch_end(args: Any, state: Any, control: Any) -> Any:
        called.append("epoch end")
        return control

    trainer = SimpleNamespace(
        args=SimpleNamespace(eval_on_start=True), model_wrapped=None, _tr_loss=None,
        state=SimpleNamespace(epoch=1.0, global_step=step, max_steps=9),
        control=SimpleNamespace(should_training_stop=False),
        callback_handler=SimpleNamespace(on_epoch_end=on_epoch_end),
        _run_epoch=lambda: called.append("trained"),
        _maybe_log_save_evaluate=lambda *arguments: called.append("log, evaluate, save"),
    )  # fmt: skip
    exact: Any = SimpleNamespace(
        script_stopped=script_stopped, epoch_ended=epoch_ended, load_rng=lambda: called.append("random state")
    )
    restored = RestoredCall(trainer, session, exact, folder=Path("checkpoint-5"), finished=False)
    with restored.ended():
        restored.begin()
        trainer._run_epoch()
        assert not trainer.args.eval_on_start, "the undisturbed run evaluates once"
    assert called == events
    assert trainer.control.should_training_stop == ("trained" not in events)
    assert trainer.args.eval_on_start
