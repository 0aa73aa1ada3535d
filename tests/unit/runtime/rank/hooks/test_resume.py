"""A finished `train()` call is restored without training, and one that was over takes no further step."""

from __future__ import annotations

from collections.abc import Callable
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
    restored = RestoredCall(trainer, session, exact)
    with restored.ended():
        restored.begin()
        trainer._run_epoch()
        assert not trainer.args.eval_on_start, "the undisturbed run evaluates once"
    assert called == events
    assert trainer.control.should_training_stop == ("trained" not in events)
    assert trainer.args.eval_on_start
