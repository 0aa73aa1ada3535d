"""Makes a trainer's checkpoints complete and verified, most of them without making training wait for a disk.

Wraps a trainer's own checkpoint method and lets it write what it always writes:

    in memory    the usual way: a copy in the run's staging (`snapshots.py`), made durable by the supervisor
    directly     where memory does not do: several nodes, no room, a script that reads the checkpoint while it saves

Either way weights that are no numbers are never saved, the manifest comes last, and older checkpoints go only after it.
Between the script's own checkpoints it takes snapshots of its own, when its `cadence` is due. Created by
`hooks/train_call.py` for each `train()` call.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.manifest import (
    Identity,
    TrainCall,
    installed_versions,
    read_manifest,
    remove_manifest,
    write_manifest,
)
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.headroom import is_full
from grpo_run.runtime.staging.slot import StagedSnapshot
from grpo_run.trainers import upstream
from grpo_run.trainers.exact.state import ExactState
from grpo_run.trainers.patches import override_attributes
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.saving import description
from grpo_run.trainers.saving.cadence import Cadence
from grpo_run.trainers.saving.save_mode import Reading, reading
from grpo_run.trainers.saving.snapshots import NO_ROOM, TAKEN, Snapshots, finite
from grpo_run.watchdog.observation import Phase

RETRY_STEPS = 100
"""After memory was too little: a copy that is given up half-way costs as much as one that is not."""


class Saver:
    """The saves of one `train()` call. Every method is collective.

    Args:
        trainer: guarded; its own methods are wrapped by `installed`.
        snapshots: of this attempt; None to write checkpoints directly to disk.
        collect_vote: called first, on every rank; collects the vote in progress, so that ranks save after agreeing.
        exact: writes this rank's part of what the trainer's own method leaves out.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        call: TrainCall,
        *,
        snapshots: Snapshots | None,
        collect_vote: Callable[[], None],
        exact: ExactState,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._snapshots = snapshots
        self.cadence = Cadence(
            session.config.snapshot_every if snapshots is not None else 0,
            failure_seconds=session.settings.failure_seconds,
            notify=self._report_interval,
            clock=time.monotonic,
        )
        """When snapshots are due."""
        self._call = call.model_copy(update={"output_dir": os.path.abspath(call.output_dir)})
        self._output = Path(self._call.output_dir)
        self._collect_vote = collect_vote
        self._exact = exact
        # now: wrapping the model for training casts and renames its parameters
        self._facts = description.manifest_fields(trainer, session.world_size)
        self._original = getattr(trainer, upstream.SAVE_CHECKPOINT)
        self._refused: int | None = None
        self._bytes = description.checkpoint_bytes(trainer)
        if session.is_main:
            self._check_room()
        self._last_bytes = self._newest_bytes() if session.is_main else None
        self._disk_is_short = False
        self._prepared = False
        self._short_until = -1
        self.saved_step = -1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the trainer's checkpoint method and take snapshots after steps, for the length of the block."""
        after_step = getattr(self._trainer, upstream.AFTER_STEP)

        @functools.wraps(self._original)
        def save(*args: Any, **kwargs: Any) -> Any:
            self._collect_vote()
            with self._in_phase():
                return self._save(args, kwargs)

        @functools.wraps(after_step)
        def after(*args: Any, **kwargs: Any) -> Any:
            result = after_step(*args, **kwargs)
            if not self._prepared and self._snapshots is not None:
                # only now have the optimizer and its offloading allocated their memory
                self._prepared = True
                self._snapshots.prepare(self._own_bytes())
            if self.cadence.due and self.saved_step != self._trainer.state.global_step:
                self._collect_vote()
                with self._in_phase():
                    self._snapshot()
            return result

        with override_attributes(
            self._trainer, **{upstream.SAVE_CHECKPOINT: save, upstream.AFTER_STEP: after}
        ):
            yield

    def finish(self) -> Path | None:
        """The durable checkpoint of the step where the call ended, saved now when the script's schedule did not.

        Returns:
            None when there is none: the weights are no numbers, or the disk does not take it.
        """
        session, step, snapshots = self._session, self._trainer.state.global_step, self._snapshots
        path = self._output / f"checkpoint-{step}"
        with self._in_phase():
            there = session.is_main and (self._is_coming(step) or self._is_durable(path))
            if not session.votes.maximum(int(there)):
                self._save((self._trainer.model_wrapped, None), {})
            if self._refused == step:
                return None
            in_memory = session.votes.maximum(int(session.is_main and self._is_coming(step)))
            if in_memory and (snapshots is None or not snapshots.wait_durable()):
                session.warn(
                    f"{path} is not on disk yet; the supervisor goes on trying when the script has ended"
                )
                return None
            return path

    # inside

    def _report_interval(self, text: str, steps: int, cost_seconds: float, step_seconds: float) -> None:
        """Print and journal the chosen interval between snapshots, on rank 0."""
        if self._session.is_main:
            self._session.notify(text)
            self._session.journal.write(
                "snapshot_interval",
                rank=0,
                steps=steps,
                cost_seconds=cost_seconds,
                step_seconds=step_seconds,
                failure_seconds=self._session.settings.failure_seconds,
            )

    def _check_room(self) -> None:
        """Warn at the start of a disk that will be full tonight."""
        folder = self._output
        while not folder.exists():
            folder = folder.parent
        free, one = _free_bytes(folder), self._bytes
        kept = self._trainer.args.save_total_limit
        # one more than are kept, as an older one goes only when the newer is complete
        if one and free < one * ((kept or 1) + 1):
            self._session.warn(
                f"{folder} has {free / 1e9:.1f} GB free, and a checkpoint of this model takes about {one / 1e9:.1f} GB:"
                f" {f'save_total_limit={kept} needs' if kept else 'two need'} {one * ((kept or 1) + 1) / 1e9:.1f} GB"
            )

    def _newest_bytes(self) -> int | None:
        """What the run's newest checkpoint on disk takes; None before the first."""
        for found in find_checkpoints(self._output):
            if found.manifest.run_id == self._session.config.run_id:
                return found.manifest.size_bytes
        return None

    def _own_bytes(self) -> int:
        """About what this rank writes: with DDP rank 0 writes all, else all write a share, and rank 0 the whole model too."""
        whole = self._bytes
        if self._facts["layout"] == "ddp":
            return whole if self._session.is_main else 0
        return whole // self._session.world_size + (whole // 3 if self._session.is_main else 0)

    @contextmanager
    def _in_phase(self) -> Iterator[None]:
        slot = self._session.slot
        try:
            slot.enter(Phase.checkpoint)
            yield
        finally:
            slot.leave(Phase.checkpoint)

    def _is_coming(self, step: int) -> bool:
        """Whether it is in memory and will be durable by itself; a snapshot nobody asked for may never be."""
        last = self._snapshots.last if self._snapshots is not None else None
        if last is None:
            return False
        staged: StagedSnapshot = last[1]
        return staged.scheduled and staged.step == step and staged.train_call == self._call

    def _is_durable(self, path: Path) -> bool:
        """Whether `path` holds a complete checkpoint of this run's call, not another's of the same number."""
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            return False
        return manifest.train_call_key == (self._session.config.run_id, self._call.ordinal)

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A checkpoint that the script, or a person, asked for."""
        began = time.perf_counter()
        if not self._agree_on_finite():
            return None
        snapshots = self._snapshots
        # callbacks may differ by rank, as one that uploads is rank 0's
        read = self._session.votes.maximum(reading(self._trainer))
        if snapshots is None or read == Reading.within_the_save or self._is_short():
            return self._save_directly(args, kwargs, began)
        if self._take(args, kwargs, scheduled=True) != TAKEN:
            return self._save_directly(args, kwargs, began)
        if read == Reading.after_the_save:
            snapshots.wait_durable()
        self._note(began)
        return None

    def _snapshot(self) -> None:
        """One of our own: in memory, or not at all."""
        from transformers.trainer_utils import SaveStrategy

        began = time.perf_counter()
        assert self._snapshots is not None, "none are due without"
        if self._is_short() or not self._agree_on_finite():
            return
        with (
            _quiet(),
            override_attributes(self._trainer, create_model_card=lambda *args, **kwargs: None),
            # no upload, and none becomes the best: its directory in memory is not there for long
            override_attributes(self._trainer.args, push_to_hub=False, save_strategy=SaveStrategy.NO),
        ):
            outcome = self._take((self._trainer.model_wrapped, None), {}, scheduled=False)
        if outcome == TAKEN:
            self._note(began)

    def _is_short(self) -> bool:
        """Memory was too little not long ago; every rank was told, so every rank says the same."""
        return bool(self._trainer.state.global_step < self._short_until)

    def _note(self, began: float) -> None:
        slot = self._session.slot
        self.saved_step = slot.checkpoint_step = self._trainer.state.global_step
        slot.checkpoint_seconds += time.perf_counter() - began

    def _agree_on_finite(self) -> bool:
        """Weights that are no numbers are not saved; says so once a step."""
        step = self._trainer.state.global_step
        if not self._session.votes.maximum(int(not finite(self._trainer))):
            return True
        if self._session.is_main and self._refused != step:
            self._session.journal.write(
                "checkpoint_rejected",
                rank=0,
                step=step,
                path=str(self._output / f"checkpoint-{step}"),
                reason="weights are not finite",
                cause="nonfinite",
            )
            self._session.notify(f"step {step} is not saved: weights are not finite")
        self._refused = step
        return False

    def _identity(self, *, scheduled: bool) -> Identity:
        """What a checkpoint of the present step is."""
        return Identity(
            run_id=self._session.config.run_id,
            train_call=self._call,
            step=self._trainer.state.global_step,
            world_size=self._session.world_size,
            scheduled=scheduled,
            versions=_versions(),
            **self._facts,
        )

    def _best(self) -> str | None:
        """Directory name of the script's best checkpoint so far."""
        best = self._trainer.state.best_model_checkpoint
        return Path(best).name if best else None

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, scheduled: bool) -> int:
        session, trainer = self._session, self._trainer
        assert self._snapshots is not None
        staged = StagedSnapshot(
            attempt=session.settings.attempt,
            output_dir=self._call.output_dir,
            limit=trainer.args.save_total_limit,
            best=self._best(),
            staged_at=time.time(),
            **dict(self._identity(scheduled=scheduled)),
        )
        outcome: int = self._snapshots.take(
            trainer, staged, lambda folder: self._write(folder, args, kwargs), self._bytes
        )
        if outcome == NO_ROOM:
            self._short_until = staged.step + RETRY_STEPS
        if outcome == TAKEN:
            self.cadence.taken(staged.step, self._snapshots.cost_seconds)
        if session.is_main:
            if outcome == TAKEN:
                session.journal.write(
                    "checkpoint_staged",
                    rank=0,
                    step=staged.step,
                    train_call=self._call.ordinal,
                    scheduled=scheduled,
                    seconds=self._snapshots.cost_seconds,
                )
            elif outcome == NO_ROOM:
                self._snapshots.warn_no_memory(staged.step)
        return outcome

    def _write(self, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All that this rank has to write of a checkpoint."""
        with (
            # a checkpoint of the model alone could not be gone on from: whole ones while the run lasts
            override_attributes(self._trainer.args, save_total_limit=None, save_only_model=False),
            override_attributes(self._trainer, create_model_card=self._card(self._trainer.create_model_card)),
        ):
            result = self._original(*args, **kwargs)
        self._exact.save(folder)
        return result

    def _card(self, create: Callable[..., None]) -> Callable[..., None]:
        """TRL's, but for a full disk: it lies beside the checkpoints, and rank 0 would leave the others in the save."""

        def create_model_card(*args: Any, **kwargs: Any) -> None:
            try:
                create(*args, **kwargs)
            except OSError as error:
                if not is_full(error, self._output):
                    raise
                self._session.warn_in_journal(f"no model card: {error}")

        return create_model_card

    def _save_directly(self, args: tuple[Any, ...], kwargs: dict[str, Any], began: float) -> Any:
        identity = self._identity(scheduled=True)
        path = self._output / identity.folder
        # asked before anything is begun: a rank that gives up half-way leaves the others in a collective of the save
        if self._agree_on_a_short_disk(path):
            return None
        if self._session.is_main:
            remove_manifest(path)
        result = self._write(path, args, kwargs)
        self._session.votes.maximum(identity.step)  # every rank has written its files
        if self._session.is_main:
            self._publish(identity, path, began)
        self._note(began)
        return result

    def _agree_on_a_short_disk(self, path: Path) -> bool:
        """Whether there is no room for another one as large as the last; an alert, and said once until there is."""
        session, short = self._session, False
        # the last one is what the run was for: it is tried
        if (
            session.is_main
            and self._last_bytes is not None
            and not self._trainer.control.should_training_stop
        ):
            free = _free_bytes(self._output)
            short = free < self._last_bytes
            if short:
                sentence = (
                    f"{path} is not saved, {free / 1e9:.1f} GB are free and the last one took"
                    f" {self._last_bytes / 1e9:.1f} GB: training goes on, and a fault costs the work since then"
                )
                session.journal.write(
                    "checkpoint_failed",
                    rank=0,
                    step=self._trainer.state.global_step,
                    cause="disk_full",
                    reason=sentence,
                )
                if not self._disk_is_short:
                    session.warn(sentence)
            self._disk_is_short = short
        return bool(session.votes.maximum(int(short)))

    def _publish(self, identity: Identity, path: Path, began: float) -> None:
        manifest = write_manifest(path, identity)
        self._last_bytes = manifest.size_bytes
        self._session.journal.write(
            "checkpoint_published",
            rank=self._session.rank,
            step=identity.step,
            path=str(path),
            verified=True,
            train_call=self._call.ordinal,
            scheduled=True,
            durable=True,
            size_bytes=self._last_bytes,
            seconds=time.perf_counter() - began,
        )
        self._session.journal.sync()
        # the best as it is now: the save may have found a better one
        limit, best = self._trainer.args.save_total_limit, self._best()
        rotate(self._output, newest=path, limit=limit, best=best)


def _free_bytes(folder: Path) -> float:
    """Infinite where the file system does not say: then a save finds out."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.inf


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no repeated warning for what nobody asked for."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


@functools.cache
def _versions() -> dict[str, str]:
    return installed_versions()
