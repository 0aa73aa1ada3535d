"""The save mode follows from settings and overridden callback methods; no callback is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import WandbCallback

from grpo_run.runtime.rank.hooks._callback import GuardCallback
from grpo_run.runtime.rank.saving.contents import NON_READING_CALLBACKS, SaveMode, save_mode


class OnSave(TrainerCallback):
    """A callback of the script that reads each checkpoint."""

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Read the checkpoint."""


class OnTrainEnd(TrainerCallback):
    """A callback of the script that reads the last checkpoint."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Read the checkpoint."""


class InheritsOnSave(OnSave):
    """A callback that inherits the method."""


def trainer(*callbacks: type[TrainerCallback], step: int = 5, **arguments: Any) -> Any:
    """Return a trainer in a call of ten steps; callbacks are not initialized, because none is called."""
    return SimpleNamespace(
        args=SimpleNamespace(**{"push_to_hub": False, "metric_for_best_model": None} | arguments),
        state=SimpleNamespace(global_step=step, max_steps=10),
        callback_handler=SimpleNamespace(callbacks=[callback.__new__(callback) for callback in callbacks]),
    )


@pytest.mark.parametrize("arguments", [{"push_to_hub": True}, {"metric_for_best_model": "loss"}])
def test_a_checkpoint_that_the_trainer_reads_is_saved_directly(arguments: dict[str, Any]) -> None:
    """Holds for any callbacks."""
    assert save_mode(trainer(OnSave, **arguments)) is SaveMode.directly


@pytest.mark.parametrize("callback", [OnSave, InheritsOnSave])
def test_a_callback_with_on_save_waits_for_the_disk(callback: type[TrainerCallback]) -> None:
    """The method can be inherited."""
    assert save_mode(trainer(PrinterCallback, callback)) is SaveMode.in_memory_then_wait


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, SaveMode.in_memory),
        ("", SaveMode.in_memory),
        ("false", SaveMode.in_memory),
        ("1", SaveMode.in_memory_then_wait),
        ("checkpoint", SaveMode.in_memory_then_wait),
    ],
)
def test_callbacks_of_grpo_run_and_the_libraries_read_what_they_upload(
    monkeypatch: pytest.MonkeyPatch, value: str | None, mode: SaveMode
) -> None:
    """Nothing, unless an upload variable is set."""
    assert "WandbCallback" in NON_READING_CALLBACKS
    if value is not None:
        monkeypatch.setenv("WANDB_LOG_MODEL", value)
    assert save_mode(trainer(GuardCallback, PrinterCallback, WandbCallback, TrainerCallback)) is mode


def test_a_callback_with_on_train_end_waits_for_the_last_checkpoint() -> None:
    """Applies to the script's callbacks, which run before `finish` could wait."""
    assert save_mode(trainer(OnTrainEnd)) is SaveMode.in_memory
    assert save_mode(trainer(OnTrainEnd, step=10)) is SaveMode.in_memory_then_wait
    assert save_mode(trainer(WandbCallback, step=10)) is SaveMode.in_memory
