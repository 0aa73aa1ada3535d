"""Describe and write the contents of a checkpoint: the trainer's own files and the exact state.

Used by `saver.py` for both kinds of saves. Does not decide where a checkpoint goes, and takes no vote.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.manifest import Identity, TrainCall, installed_versions
from grpo_run.runtime.staging.headroom import is_full
from grpo_run.runtime.staging.slot import StagedSnapshot
from grpo_run.trainers import upstream
from grpo_run.trainers.exact.state import ExactState
from grpo_run.trainers.patches import override_attributes
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.saving import description


class CheckpointContents:
    """The contents of the checkpoints of one `train()` call.

    Args:
        call: with an absolute `output_dir`.
        exact: saves what the trainer's own method leaves out.
    """

    def __init__(self, trainer: Any, session: Session, call: TrainCall, exact: ExactState) -> None:
        self._trainer = trainer
        self._session = session
        self._call = call
        self._exact = exact
        self._save_checkpoint = getattr(trainer, upstream.SAVE_CHECKPOINT)
        # described now, because wrapping the model for training casts and renames its parameters
        self._description = description.manifest_fields(trainer, session.world_size)
        self.size_bytes = description.checkpoint_bytes(trainer)
        """Approximate size over all ranks; 0 if not known."""

    def rank_bytes(self) -> int:
        """Return the approximate size of this rank's part.

        With DDP rank 0 writes everything. With sharded state each rank writes a share, and rank 0 also the
        full model.
        """
        if self._description["layout"] == "ddp":
            return self.size_bytes if self._session.is_main else 0
        full_model = self.size_bytes // 3 if self._session.is_main else 0
        return self.size_bytes // self._session.world_size + full_model

    def identity(self, *, scheduled: bool, kept: bool = False) -> Identity:
        """Return the identity of a checkpoint of the current step.

        Args:
            scheduled: whether the script's own schedule asked for it.
            kept: whether the user did.
        """
        return Identity(
            run_id=self._session.config.run_id,
            train_call=self._call,
            step=self._trainer.state.global_step,
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
            output_dir=self._call.output_dir,
            limit=self._trainer.args.save_total_limit,
            best=self.best(),
            staged_at=time.time(),
            urgent=urgent,
            **dict(self.identity(scheduled=scheduled, kept=kept)),
        )

    def best(self) -> str | None:
        """Return the directory name of the script's best checkpoint so far."""
        best = self._trainer.state.best_model_checkpoint
        return Path(best).name if best else None

    def write(self, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write this rank's part, and return what the trainer's method returns.

        Collective with sharded state.

        Args:
            folder: the checkpoint's directory.
            args, kwargs: of the trainer's method.
        """
        with (
            # complete checkpoints during the run, because one of the model alone cannot be resumed
            override_attributes(self._trainer.args, save_total_limit=None, save_only_model=False),
            override_attributes(
                self._trainer, create_model_card=self._tolerate_full_disk(self._trainer.create_model_card)
            ),
        ):
            returned = self._save_checkpoint(*args, **kwargs)
        self._exact.save(folder)
        return returned

    def _tolerate_full_disk(self, create_model_card: Callable[..., None]) -> Callable[..., None]:
        """Wrap TRL's method so that a full disk loses only the model card.

        Only rank 0 calls it, during the save: if it raised, the other ranks would wait in the save.
        """

        def create(*args: Any, **kwargs: Any) -> None:
            try:
                create_model_card(*args, **kwargs)
            except OSError as error:
                if not is_full(error, Path(self._call.output_dir)):
                    raise
                self._session.warn_in_journal(f"no model card: {error}")

        return create

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Suppress the side effects of a save that the script did not ask for.

        No model card, upload, progress bar or warning, and the checkpoint does not become the best one. The trainer's
        record of callbacks stays as it was: transformers appends to it at each save.
        """
        from transformers.trainer_utils import SaveStrategy

        callbacks = self._trainer.state.stateful_callbacks
        unchanged = {
            name: _Unchanged(value) if isinstance(value, list) else value for name, value in callbacks.items()
        }
        with (
            override_attributes(self._trainer.state, stateful_callbacks=unchanged),
            _quiet(),
            override_attributes(self._trainer, create_model_card=lambda *args, **kwargs: None),
            override_attributes(self._trainer.args, push_to_hub=False, save_strategy=SaveStrategy.NO),
        ):
            yield


class _Unchanged(list[Any]):
    """A list to which nothing is appended."""

    def append(self, value: Any) -> None:
        """Ignore the value."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and warnings."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@functools.cache
def _versions() -> dict[str, str]:
    return installed_versions()
