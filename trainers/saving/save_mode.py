"""Who reads a checkpoint's directory as soon as it is saved: the trainer itself, or a callback. Called by `saver.py`.

Looks at settings and at what callbacks override; runs none of them.
"""

from __future__ import annotations

import enum
import os
from typing import Any

UPLOADS = ("WANDB_LOG_MODEL", "HF_MLFLOW_LOG_ARTIFACTS", "COMET_LOG_ASSETS", "CLEARML_LOG_MODEL")
"""With one of these set, a callback of transformers' own reads the checkpoint as soon as it is saved."""
QUIET_CALLBACKS = frozenset(
    {
        "AzureMLCallback", "ClearMLCallback", "CometCallback", "DefaultFlowCallback", "MLflowCallback",
        "SwanLabCallback", "TrackioCallback", "WandbCallback",
    }
)  # fmt: skip
"""Of the libraries' own callbacks, those that read no checkpoint unless a variable of `UPLOADS` is set."""


class Reading(enum.IntEnum):
    """When a checkpoint is read, in the order of what it asks for: what one rank needs, all ranks do."""

    later = 0
    after_the_save = 1
    within_the_save = 2


def reading(trainer: Any) -> Reading:
    """When something on this rank reads the checkpoint that is about to be saved."""
    arguments, state = trainer.args, trainer.state
    if arguments.push_to_hub or arguments.metric_for_best_model is not None:
        return Reading.within_the_save
    uploads = any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in UPLOADS)
    last = state.global_step >= state.max_steps
    for callback in trainer.callback_handler.callbacks:
        library, _, _ = type(callback).__module__.partition(".")
        if library == "grpo_run" or (type(callback).__name__ in QUIET_CALLBACKS and not uploads):
            continue
        # what happens at the end of training is called before `Saver.finish` could wait
        if _overrides(callback, "on_save") or (
            last and library not in ("transformers", "trl") and _overrides(callback, "on_train_end")
        ):
            return Reading.after_the_save
    return Reading.later


def _overrides(callback: Any, event: str) -> bool:
    from transformers import TrainerCallback

    return getattr(type(callback), event, None) is not getattr(TrainerCallback, event)
