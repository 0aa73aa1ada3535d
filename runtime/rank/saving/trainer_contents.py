"""The checkpoints of a `train()` call: the trainer's own files and the exact state, and the trainer's own
schedule.

Called by `runtime/rank/hooks/train_call.py`, which makes the trainer's checkpoint method go through the
`Saver` (`save_through`).
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerState

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.rank.exact.state import ExactState
from grpo_run.runtime.rank.saving._spare_files import grant_memory
from grpo_run.runtime.rank.saving.contents import CheckpointContents, SaveMode, save_mode
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.snapshots.headroom import is_full
from grpo_run.runtime.snapshots.slot import COMPACT
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.patches import Handler, override_attributes, wrapped_methods
from grpo_run.runtime.upstream.process_names import FILTERS_CHANGED


class TrainerContents(CheckpointContents):
    """The contents of the checkpoints of one `train()` call.

    Args:
        facts: of the trainer, read before its model was wrapped.
        exact: saves what the trainer's own method leaves out.
    """

    def __init__(
        self, trainer: Any, facts: TrainerFacts, session: Session, call: TrainCall, exact: ExactState
    ) -> None:
        super().__init__(
            session, call, description=facts.manifest_fields, size_bytes=sum(facts.file_bytes.values())
        )
        self._large_files = facts.file_bytes if session.is_main and not facts.is_sharded else {}
        self._trainer = trainer
        self._exact = exact
        self._save_checkpoint = getattr(trainer, trainer_names.SAVE_CHECKPOINT)
        self._to_push = False

    @property
    def step(self) -> int:
        """The trainer's `global_step`."""
        return int(self._trainer.state.global_step)

    @property
    def call_ends(self) -> bool:
        """Whether a callback or the number of steps ends the call."""
        return bool(self._trainer.control.should_training_stop) or self.step >= self._trainer.state.max_steps

    @property
    def awaits_events(self) -> bool:
        """Whether the step is the last of an epoch, whose evaluation and callbacks follow."""
        epoch_ends = (
            self.call_ends
            or self._trainer.control.should_epoch_stop
            or float(self._trainer.state.epoch or 0).is_integer()
        )
        return epoch_ends and not self._exact.epoch_ended

    @property
    def limit(self) -> int | None:
        """The script's `save_total_limit`."""
        limit: int | None = self._trainer.args.save_total_limit
        return limit

    def parameters(self) -> Iterable[Any]:
        """Return the model's parameters."""
        parameters: Iterable[Any] = self._trainer.model.parameters()
        return parameters

    def large_files(self) -> Mapping[str, int]:
        """Return the sizes of weights and optimizer on the rank that writes them, unless state is sharded."""
        return self._large_files

    def best(self) -> str | None:
        """Return the directory name of the script's best checkpoint so far."""
        best = self._trainer.state.best_model_checkpoint
        return Path(best).name if best else None

    def save_mode(self) -> SaveMode:
        """Return the mode that the trainer's settings and callbacks need."""
        return save_mode(self._trainer)

    def write(self, folder: Path, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's part, and return what the trainer's method returns.

        Collective with sharded state.

        Args:
            folder: the checkpoint's directory.
            args, kwargs: of the trainer's method; those that the trainer itself passes by default.
        """
        if not args and not kwargs:
            args = (self._trainer.model_wrapped, None)
        directory, elsewhere, named = folder.parent, dict[str, Any](), list[Handler]()
        if directory != Path(self.call.output_dir):
            elsewhere = {trainer_names.OUTPUT_DIR: lambda trial=None: str(directory)}
        if self._session.fence(self.call.output_dir) is not None:
            # the checkpoint has its name only later
            elsewhere[trainer_names.PUSH] = self._push_later
            named.append(functools.partial(self._name_best, directory))
        with (
            # complete checkpoints during the run, because one of the model alone cannot be resumed
            override_attributes(self._trainer.args, save_total_limit=None, save_only_model=False),
            wrapped_methods(self._trainer, {"create_model_card": [self._tolerate_full_disk]}),
            override_attributes(self._trainer, **elsewhere),
            compact(self._trainer.state, folder, self._session.config.snapshot_directory),
            wrapped_methods(self._trainer.state, {"save_to_json": named}),
        ):
            returned = self._save_checkpoint(*args, **kwargs)
        for name_best in named:
            name_best(lambda: None)  # on the other ranks too
        self._exact.save(folder)
        return returned

    def _push_later(self, checkpoint_folder: str) -> None:
        self._to_push = True

    def published(self, folder: Path) -> None:
        """Begin the upload that the save has put off."""
        if self._to_push:
            self._to_push = False
            getattr(self._trainer, trainer_names.PUSH)(str(folder))

    def _name_best(self, directory: Path, original: Callable[..., None], *args: Any) -> None:
        """Correct where the trainer finds its best checkpoint, then call `original`.

        Args:
            directory: where the present checkpoint is written; it gets its name in the output directory.
        """
        state = self._trainer.state
        best = state.best_model_checkpoint
        if best is not None and Path(best).parent == directory:
            state.best_model_checkpoint = os.path.join(self._trainer.args.output_dir, Path(best).name)
        original(*args)

    def _tolerate_full_disk(self, create_model_card: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call TRL's method; a disk that is full or read-only loses only the model card.

        Only rank 0 calls it, during the save: if it raised, the other ranks would wait in the save.
        """
        try:
            create_model_card(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.EROFS and not is_full(error, Path(self.call.output_dir)):
                raise
            self._session.warn_in_journal(f"no model card: {error}")

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Suppress the side effects of a save that the script did not ask for.

        No model card, upload, progress bar or warning, and the checkpoint does not become the best one. The
        trainer's record of callbacks stays that of the last save that the script asked for, also in the
        checkpoint: transformers changes it at each save, and our exact state has the callbacks' present
            state.
        """
        from transformers.trainer_utils import SaveStrategy

        callbacks = self._trainer.state.stateful_callbacks
        unchanged = _UnchangedRecord(
            {
                name: _UnchangedList(value) if isinstance(value, list) else value
                for name, value in callbacks.items()
            }
        )
        with (
            override_attributes(self._trainer.state, stateful_callbacks=unchanged),
            _quiet(),
            override_attributes(self._trainer, create_model_card=lambda *args, **kwargs: None),
            override_attributes(self._trainer.args, push_to_hub=False, save_strategy=SaveStrategy.NO),
        ):
            yield


class _UnchangedRecord(dict[str, Any]):
    """A mapping in which nothing is set after its creation."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Ignore the value."""


class _UnchangedList(list[Any]):
    """A list to which nothing is appended."""

    def append(self, value: Any) -> None:
        """Ignore the value."""


@contextmanager
def compact(state: Any, folder: Path, area: Path | None) -> Iterator[None]:
    """Within the block, write the trainer's state into a snapshot without line breaks, which is done in C.

    Transformers writes all log entries into each checkpoint, with line breaks. What JSON does not have, such
    as a tensor, becomes a number, a list or text: transformers would fail where the script saves, but a
    snapshot is not the script's.

    Args:
        state: the trainer's; one with a method of its own writes itself.
        folder: the directory of the checkpoint; outside `area`, nothing changes.
        area: the staging area.
    """

    def save(json_path: str) -> None:
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        text = COMPACT + json.dumps(fields, sort_keys=True, default=_plain) + "\n"
        grant_memory(folder, len(text))
        Path(json_path).write_text(text, encoding="utf-8")

    staged = area is not None and folder.is_relative_to(area)
    usual = getattr(type(state), "save_to_json", None) is TrainerState.save_to_json
    with override_attributes(state, save_to_json=save) if staged and usual else nullcontext():
        yield


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and warnings.

    Python forgets which warnings it has shown whenever a block changes its filters, and a save of torch
    does too. The filters are those of before when the block ends, so Python is not told: else the script's
    own warnings would be printed again after each snapshot.
    """
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with override_attributes(warnings, **{FILTERS_CHANGED: lambda: None}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def save_through(
    saver: Saver, trainer: Any, contents: TrainerContents, checkpoint: Callable[[], None]
) -> AbstractContextManager[None]:
    """Within the block, replace the trainer's checkpoint method.

    Args:
        checkpoint: called when the trainer has logged, evaluated and saved after a step or at the end of an
            epoch.
    """

    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return saver.save(lambda folder: contents.write(folder, *args, **kwargs))

    def after(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        checkpoint()
        return result

    return wrapped_methods(
        trainer, {trainer_names.SAVE_CHECKPOINT: [save], trainer_names.AFTER_STEP: [after]}
    )
