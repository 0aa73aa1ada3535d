"""The contents of a checkpoint and the position of its call: the interface between savers and what they save.

Implemented for Trainers in `trainer_contents.py` and for hand-written loops in `trainers/loops/contents.py`. Used by
`saver.py` for both kinds of saves. Does not decide where a checkpoint goes, and takes no vote.
"""

from __future__ import annotations

import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.manifest import Identity, TrainCall, installed_versions
from grpo_run.runtime.staging.slot import StagedSnapshot
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.saving.save_mode import SaveMode


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
    return installed_versions()
