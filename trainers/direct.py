"""A checkpoint written straight to its directory, as the trainer does, where memory does not do. Called by `saving.py`.

Its manifest comes when every rank has written; a full disk costs this checkpoint, not the run, where no rank can be
left waiting for another. Does not decide when to save, nor what is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_run.runtime import checkpoints, partials, rotation
from grpo_run.runtime.checkpoints import Identity
from grpo_run.runtime.room import is_full
from grpo_run.trainers import upstream
from grpo_run.trainers.session import Session


def save_directly(
    session: Session,
    output: Path,
    identity: Identity,
    write: Callable[[Path], Any],
    *,
    limit: int | None,
    best: str | None,
    dispensable: bool,
) -> tuple[bool, Any]:
    """Write one. Collective.

    Args:
        output: where the script's checkpoints go.
        identity: what it will be.
        write: writes this rank's part; given the checkpoint's directory.
        limit, best: see `rotation.rotate`.
        dispensable: the run may go on without it when the disk is full.

    Returns:
        Whether it is there, equal on every rank, and what `write` returned.
    """
    began = time.perf_counter()
    path = output / identity.folder
    ours = session.is_main and not path.exists()
    if session.is_main:
        checkpoints.withdraw(path)
    session.votes.maximum(0)  # nobody writes before that
    result, failed = None, False
    try:
        result = write(path)
    except (Exception, upstream.collective_save_error()) as error:
        if not dispensable or not _may_go_on(error, identity, output):
            raise
        failed = _note(session, identity, path, error)
    failed = bool(session.votes.maximum(int(failed)))  # every rank has written its files
    if session.is_main and not failed:
        try:
            _publish(session, identity, path, began)
        except OSError as error:
            if not dispensable or not is_full(error, output):
                raise
            failed = _note(session, identity, path, error)
    failed = bool(session.votes.maximum(int(failed)))
    if session.is_main and failed:
        if ours:  # else somebody's files may be among them
            with suppress(OSError):  # without a manifest it is no checkpoint
                partials.remove(path, path.name)
        session.warn(
            f"{path} is not saved, the disk is full: training goes on, and a fault costs the work since the last one"
        )
    elif session.is_main:
        rotation.rotate(output, newest=path, limit=limit, best=best)
    return not failed, result


def _may_go_on(error: BaseException, identity: Identity, output: Path) -> bool:
    """The disk is full, and no other rank waits in a collective of the save for the one that gave up."""
    causes = upstream.save_errors(error)
    together = causes != [error] or identity.layout == "ddp" or identity.world_size == 1
    return together and any(is_full(cause, output) for cause in causes)


def _note(session: Session, identity: Identity, path: Path, error: BaseException) -> bool:
    session.journal.write(
        "checkpoint_failed",
        rank=session.rank,
        step=identity.step,
        cause="disk_full",
        reason=f"{path} could not be written, the disk is full: {error}",
    )
    return True


def _publish(session: Session, identity: Identity, path: Path, began: float) -> None:
    manifest = checkpoints.write_manifest(path, identity)
    session.journal.write(
        "checkpoint_published",
        rank=session.rank,
        step=identity.step,
        path=str(path),
        verified=True,
        train_call=identity.train_call.ordinal,
        scheduled=True,
        durable=True,
        size_bytes=sum(entry.size for entry in manifest.files.values()),
        seconds=time.perf_counter() - began,
    )
    session.journal.sync()
