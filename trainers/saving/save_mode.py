"""Whether a checkpoint can be saved in memory: does the trainer or a callback read it soon?

Called by `saver.py`. Reads settings and checks which
callback methods are overridden; runs none of them.
"""

from __future__ import annotations

import enum
import os
from typing import Any

UPLOAD_VARIABLES = ("WANDB_LOG_MODEL", "HF_MLFLOW_LOG_ARTIFACTS", "COMET_LOG_ASSETS", "CLEARML_LOG_MODEL")
"""If one of these is set in the environment, a callback of transformers uploads each checkpoint."""
NON_READING_CALLBACKS = frozenset(
    {
        "AzureMLCallback", "ClearMLCallback", "CometCallback", "DefaultFlowCallback", "MLflowCallback",
        "SwanLabCallback", "TrackioCallback", "WandbCallback",
    }
)  # fmt: skip
"""Callbacks of the libraries that read no checkpoint unless one of `UPLOAD_VARIABLES` is set."""


class SaveMode(enum.IntEnum):
    """Where a checkpoint is saved. Ordered: the highest mode of any rank applies to all ranks."""

    in_memory = 0
    """Nothing reads it soon."""
    in_memory_then_wait = 1
    """A callback reads it after the save, so the save returns when it is on disk."""
    directly = 2
    """The trainer reads it during the save, so it is written to disk at once."""


def save_mode(trainer: Any) -> SaveMode:
    """Return the mode that this rank needs for the next checkpoint."""
    arguments, state = trainer.args, trainer.state
    if arguments.push_to_hub or arguments.metric_for_best_model is not None:
        return SaveMode.directly
    uploads = any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in UPLOAD_VARIABLES)
    last_step = state.global_step >= state.max_steps
    for callback in trainer.callback_handler.callbacks:
        library, _, _ = type(callback).__module__.partition(".")
        if library == "grpo_run" or (type(callback).__name__ in NON_READING_CALLBACKS and not uploads):
            continue
        # on_train_end runs before `Saver.finish`, which would wait for the disk
        if _overrides(callback, "on_save") or (
            last_step and library not in ("transformers", "trl") and _overrides(callback, "on_train_end")
        ):
            return SaveMode.in_memory_then_wait
    return SaveMode.in_memory


def _overrides(callback: Any, event: str) -> bool:
    from transformers import TrainerCallback

    return getattr(type(callback), event, None) is not getattr(TrainerCallback, event)
