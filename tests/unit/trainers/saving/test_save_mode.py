"""When a checkpoint is read: looked up in settings and callbacks, without calling any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import WandbCallback

from grpo_run.trainers.hooks.callback import GuardCallback
from grpo_run.trainers.saving.save_mode import QUIET_CALLBACKS, UPLOADS, Reading, reading


class OnSave(TrainerCallback):
    """A script's own that reads what was saved."""

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Read it."""


class OnTrainEnd(TrainerCallback):
    """A script's own that reads the last one."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Read it."""


class Inherits(OnSave):
    """Overrides nothing itself."""


@pytest.fixture(autouse=True)
def _no_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in this environment."""
    for name in UPLOADS:
        monkeypatch.delenv(name, raising=False)


def trainer(*callbacks: type[TrainerCallback], step: int = 5, **arguments: Any) -> Any:
    """In the midst of a call of ten steps; callbacks are only looked at, so none is made whole."""
    return SimpleNamespace(
        args=SimpleNamespace(**{"push_to_hub": False, "metric_for_best_model": None} | arguments),
        state=SimpleNamespace(global_step=step, max_steps=10),
        callback_handler=SimpleNamespace(callbacks=[callback.__new__(callback) for callback in callbacks]),
    )


@pytest.mark.parametrize("arguments", [{"push_to_hub": True}, {"metric_for_best_model": "loss"}])
def test_the_trainer_itself_reads_it_within_the_save(arguments: dict[str, Any]) -> None:
    """Whatever callbacks there are."""
    assert reading(trainer(OnSave, **arguments)) is Reading.within_the_save


@pytest.mark.parametrize("callback", [OnSave, Inherits])
def test_a_callback_that_overrides_on_save_reads_it_after(callback: type[TrainerCallback]) -> None:
    """Its own or one that it inherits."""
    assert reading(trainer(PrinterCallback, callback)) is Reading.after_the_save


def test_our_own_and_the_libraries_quiet_ones_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a variable asks for an upload."""
    assert "WandbCallback" in QUIET_CALLBACKS
    assert reading(trainer(GuardCallback, PrinterCallback, WandbCallback, TrainerCallback)) is Reading.later
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    assert reading(trainer(WandbCallback)) is Reading.after_the_save


def test_the_end_of_training_reads_the_last_one() -> None:
    """Of a script's callbacks; it comes before the supervisor could be waited for."""
    assert reading(trainer(OnTrainEnd)) is Reading.later
    assert reading(trainer(OnTrainEnd, step=10)) is Reading.after_the_save
    assert reading(trainer(WandbCallback, step=10)) is Reading.later


def test_what_one_rank_needs_is_the_greatest() -> None:
    """Ranks agree by their maximum."""
    assert max(Reading) is Reading.within_the_save
    assert min(Reading) is Reading.later
