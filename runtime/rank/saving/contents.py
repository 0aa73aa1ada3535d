"""The interface between savers and what they save, and whether a checkpoint may go to memory first.

`CheckpointContents` has the contents of a checkpoint and the position of its call. It is implemented for
Trainers in `trainer_contents.py` and for hand-written loops in `runtime/rank/loops/run.py`, and used by
`saver.py`. `save_mode` reads settings and checks which callback methods are overridden: a trainer or
callback that reads the checkpoint soon needs it on disk. Runs no callback, does not decide where a
checkpoint goes, and takes no vote.
"""

from __future__ import annotations

import enum
import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.manifest import FORMAT_LIBRARIES, Identity, TrainCall
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.slot import StagedSnapshot
from grpo_run.runtime.upstream.versions import installed_versions

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


class CheckpointContents(ABC):
    """The contents of the checkpoints of one call.

    Args:
        description: the fields of `Identity` that describe model, batch and layout.
        size_bytes: approximate size of a checkpoint over all ranks; 0 if not known.
    """

    def __init__(
        self, session: Session, call: TrainCall, *, description: Mapping[str, Any], size_bytes: int
    ) -> None:
        self.call = call.model_copy(update={"output_dir": os.path.abspath(call.output_dir)})
        """The call, with an absolute `output_dir`."""
        self.size_bytes = size_bytes
        self._session = session
        self._description = dict(description)

    @property
    @abstractmethod
    def step(self) -> int:
        """The last finished step."""

    @property
    @abstractmethod
    def call_ends(self) -> bool:
        """Whether the call takes no further step."""

    @property
    @abstractmethod
    def awaits_events(self) -> bool:
        """Whether events of this step follow, which a run that resumes from the step would not repeat."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The script's `save_total_limit`."""

    @abstractmethod
    def parameters(self) -> Iterable[Any]:
        """Return the parameters that must be finite."""

    @abstractmethod
    def write(self, folder: Path) -> Any:
        """Write this rank's part into the checkpoint's directory. Collective with sharded state."""

    def published(self, folder: Path) -> None:  # noqa: B027 - most contents have nothing that waits
        """Do what waits until a checkpoint of the script's schedule that was written elsewhere has its name.

        Not collective.
        """

    def best(self) -> str | None:
        """Return the directory name of the script's best checkpoint so far."""
        return None

    def save_mode(self) -> SaveMode:
        """Return where this rank needs the next checkpoint of the script's own schedule."""
        return SaveMode.in_memory

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Suppress the side effects of a save that the script did not ask for."""
        yield

    def large_files(self) -> Mapping[str, int]:
        """Return about the size in bytes of this rank's large files, by path, as far as they are known in
        advance."""
        return {}

    def identity(self, *, scheduled: bool, kept: bool = False) -> Identity:
        """Return the identity of a checkpoint of the current step.

        Args:
            scheduled: whether the script's own schedule asked for it.
            kept: whether the user did.
        """
        return Identity(
            run_id=self._session.config.run_id,
            train_call=self.call,
            step=self.step,
            world_size=self._session.world_size,
            scheduled=scheduled,
            kept=kept,
            versions=_versions(),
            **self._description,
        )

    def staged(self, *, scheduled: bool, urgent: bool = False, kept: bool = False) -> StagedSnapshot:
        """Return the record of a snapshot of the current step."""
        return StagedSnapshot(
            attempt=self._session.settings.attempt,
            output_dir=self.call.output_dir,
            limit=self.limit,
            best=self.best(),
            staged_at=time.time(),
            urgent=urgent,
            **dict(self.identity(scheduled=scheduled, kept=kept)),
        )


@functools.cache
def _versions() -> dict[str, str]:
    return installed_versions(FORMAT_LIBRARIES)
