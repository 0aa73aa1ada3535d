"""Makes a checkpoint complete: all ranks done, digests taken, manifest written last, rotation after that.

Wraps a trainer's own checkpoint method and lets it write what it always writes. Called through the guard.
Rotation is held back until the new checkpoint is published, so that a kill at any moment leaves one that
is complete. Does not stage or compress.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from grpo_run.runtime import checkpoints
from grpo_run.runtime.checkpoints import TrainCall
from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers import upstream
from grpo_run.trainers.session import Session
from grpo_run.watchdog.observation import Phase


def wrap_save(trainer: Any, session: Session, call: TrainCall, before: Any) -> None:
    """Replace the trainer's checkpoint method by one that publishes.

    Args:
        before: called first, on every rank; collects the vote under way, so that ranks save after agreeing.
    """
    original = getattr(trainer, upstream.SAVE_CHECKPOINT)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        before()
        slot = session.slot
        try:
            slot.enter(Phase.checkpoint)
            return publish(*args, **kwargs)
        finally:
            slot.leave(Phase.checkpoint)

    def publish(*args: Any, **kwargs: Any) -> Any:
        slot = session.slot
        began = time.perf_counter()
        step = trainer.state.global_step
        path = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        if session.is_main:
            checkpoints.withdraw(path)
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        # a checkpoint of the model alone could not be gone on from: whole ones while the run lasts
        bare, trainer.args.save_only_model = trainer.args.save_only_model, False
        try:
            result = original(*args, **kwargs)
        finally:
            trainer.args.save_total_limit = limit
            trainer.args.save_only_model = bare
        session.votes.maximum(step)  # every rank has written its files
        if session.is_main:
            manifest = checkpoints.write_manifest(
                path,
                run_id=session.settings.run_id,
                train_call=call,
                step=step,
                world_size=session.world_size,
                versions=_versions(),
            )
            session.journal.write(
                "checkpoint_published",
                rank=session.rank,
                step=step,
                path=str(path.resolve()),
                verified=True,
                train_call=call.ordinal,
                size_bytes=sum(entry.size for entry in manifest.files.values()),
                seconds=time.perf_counter() - began,
            )
            session.journal.sync()
        if limit is not None and trainer.args.should_save:
            _rotate(trainer, limit)
        slot.checkpoint_step = step
        slot.checkpoint_seconds += time.perf_counter() - began
        return result

    setattr(trainer, upstream.SAVE_CHECKPOINT, save)


@functools.cache
def _versions() -> dict[str, str]:
    return checkpoints.versions()


def _rotate(trainer: Any, limit: int) -> None:
    from transformers.trainer_utils import rotate_checkpoints

    rotate_checkpoints(
        output_dir=trainer.args.output_dir,
        save_total_limit=limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


def _is_of(path: Path, session: Session, call: TrainCall) -> bool:
    """Whether `path` holds a complete checkpoint of this run's call, not another's of the same number."""
    try:
        manifest = checkpoints.read_manifest(path)
    except CheckpointError:
        return False
    return manifest.run_id == session.settings.run_id and manifest.train_call.ordinal == call.ordinal


def ensure_saved(trainer: Any, session: Session, call: TrainCall) -> Path:
    """The checkpoint of the step where the call ended, saved now when the script's schedule did not. Collective."""
    step = trainer.state.global_step
    path = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    missing = int(session.is_main and not _is_of(path, session, call))
    if session.votes.maximum(missing):
        getattr(trainer, upstream.SAVE_CHECKPOINT)(trainer.model_wrapped, None)
    return path
