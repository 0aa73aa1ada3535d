"""The drain worker: a separate process that writes snapshots from memory to disk as checkpoints.

    slot in memory -> <output_dir>/.checkpoint-N.partial-… -> digests, fsync, MANIFEST.json
                   -> rename to checkpoint-N

Only this process writes checkpoints for the supervisor, so a file system that hangs blocks nothing else. It
dies with the supervisor; the next drain deletes partial directories that it leaves. `DrainProcess` is the
supervisor's side, used by `_drain_requests.py`; `serve` is the process, and `handle_request` drains one
snapshot. The files are copied as the trainer wrote them into memory; its state gets the line breaks that
transformers writes. A snapshot that the script has not scheduled goes to a folder of its own in the output
directory (`runtime/checkpoints/search.py`). Does not choose the snapshot; `drain_scheduler.py` does.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import setproctitle

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.completeness import TRAINER_STATE
from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.checkpoints.publishing import (
    clean_partial_directories,
    make_directory,
    partial_directory,
    publish,
    remove_empty_folders,
)
from grpo_run.runtime.checkpoints.rotation import rotate, scheduled_to_keep
from grpo_run.runtime.checkpoints.search import directory_of, name_of
from grpo_run.runtime.errors import CheckpointError, SupersededError
from grpo_run.runtime.files import sync_tree
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.adoption import abandon
from grpo_run.runtime.processes.starting import die_with_parent
from grpo_run.runtime.snapshots._drain_messages import (
    DrainFailed,
    DrainProgress,
    DrainPublished,
    DrainReply,
    DrainRequest,
)
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.headroom import DISK_RESERVE_BYTES, FULL_BYTES
from grpo_run.runtime.snapshots.slot import COMPACT, BrokenSnapshotError, StagedSnapshot, StagingSlot
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.text import size_text

LOCK_WAIT_SECONDS = 30.0
"""How long a rank may hold a slot's lock before the request fails."""
COPY_BYTES = 1 << 20
"""Between two reports of progress: even a slow disk takes as much within `_drain_requests.STALL_SECONDS`."""
SYNC_BYTES = 128 << 20
"""Bytes between two syncs, which report no progress: a disk of 3 MB/s takes as much within
`_drain_requests.STALL_SECONDS`."""


def handle_request(
    staging: StagingArea, request: DrainRequest, report: Callable[[int], None]
) -> DrainPublished | DrainFailed:
    """Carry out one request. Errors of the file system or the snapshot become a `DrainFailed`.

    Args:
        report: called with the total of bytes written so far, also while they are synced and digested.
    """
    slot = staging.slots[request.slot]
    staged: StagedSnapshot | None = None

    def failed(reason: str, **more: Any) -> DrainFailed:
        if staged is not None and not staged.scheduled:  # a script may refuse a directory that is not empty
            remove_empty_folders(directory_of(staged, Path(staged.output_dir)))
        return DrainFailed(slot=slot.index, step=staged.step if staged else None, reason=reason, **more)

    try:
        with slot.locked(wait_seconds=LOCK_WAIT_SECONDS, shared=True) as acquired:
            if not acquired:
                return failed("a rank is writing the slot")
            staged = slot.read_snapshot()
            if staged is None:
                return failed("the slot is empty")
            if staged.attempt < fencing.refused_before(staging.path, staged.output_dir):
                slot.mark_drained()
                return failed("the run went on without this host after it was taken", superseded=True)
            fence = fencing.recorded(staging.path, staged.output_dir)
            return _drain(slot, staged, request, report, fence)
    except _NoSpaceError as error:
        return failed(str(error), full=True, free_bytes=error.free_bytes)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return failed(f"{error.strerror or error}{where}", full=full)
    except BrokenSnapshotError as error:
        return failed(str(error), broken=True)
    except CheckpointError as error:  # in files just written, so a fault of the disk: a retry may succeed
        return failed(str(error))
    except SupersededError as error:  # a retry succeeds if the run goes on from this snapshot
        return failed(str(error))


class _NoSpaceError(Exception):
    """The disk has less space than the checkpoint needs. Nothing was written."""

    def __init__(self, text: str, free_bytes: int) -> None:
        super().__init__(text)
        self.free_bytes = free_bytes


def _drain(
    slot: StagingSlot,
    staged: StagedSnapshot,
    request: DrainRequest,
    report: Callable[[int], None],
    fence: Path | None,
) -> DrainPublished:
    began = time.perf_counter()
    output_dir = Path(staged.output_dir)
    directory = directory_of(staged, output_dir)
    trainer_files = slot.files / staged.folder
    slot.check_complete(staged)
    needed_bytes = slot.checkpoint_bytes(staged)
    make_directory(directory)
    clean_partial_directories(directory, fence=fence)
    _require_free_space(directory, needed_bytes, request)
    final = directory / name_of(directory, staged.step)
    with partial_directory(directory, staged.step) as partial:
        progress = _WrittenBytes(report, partial)
        _copy_tree(trainer_files, partial, progress.add_written)
        _break_lines(partial / TRAINER_STATE, progress.add_written)
        manifest = write_manifest(partial, staged, progress=progress.repeat)
        publish(partial, final, fence=fence)
    slot.mark_drained()
    try:
        removed = rotate(output_dir, newest=final, limit=staged.limit, best=staged.best, fence=fence)
    except (OSError, CheckpointError):
        removed = []  # the checkpoint is published; the next one rotates
    return DrainPublished(
        slot=slot.index,
        step=staged.step,
        train_call=staged.train_call.ordinal,
        path=str(final),
        scheduled=staged.scheduled,
        kept=staged.kept,
        size_bytes=manifest.size_bytes,
        seconds=time.perf_counter() - began,
        best=staged.best,
        keeps=scheduled_to_keep(staged.limit, best=staged.best, newest=staged.folder),
        removed=tuple(map(str, removed)),
    )


class _WrittenBytes:
    """Add up written bytes, sync every `SYNC_BYTES` of them, and report the total."""

    def __init__(self, report: Callable[[int], None], partial: Path) -> None:
        self._report = report
        self._partial = partial
        self._written = self._synced = 0

    def add_written(self, size_bytes: int) -> None:
        """Count bytes just written."""
        self._written += size_bytes
        if self._written - self._synced >= SYNC_BYTES:
            sync_tree(self._partial, self.repeat)
            self._synced = self._written
        self._report(self._written)

    def repeat(self, size_bytes: int) -> None:
        """Report the same total again: bytes were synced or digested, so the disk is not stuck."""
        self._report(self._written)


def _require_free_space(directory: Path, needed_bytes: int, request: DrainRequest) -> None:
    free_bytes = shutil.disk_usage(directory).free
    reserve_bytes = FULL_BYTES if request.last else DISK_RESERVE_BYTES
    if free_bytes - reserve_bytes < needed_bytes:
        where = f"{directory} has {size_text(free_bytes)} free, and {size_text(reserve_bytes)} must stay free"
        raise _NoSpaceError(f"{size_text(needed_bytes)} are needed, and {where}", free_bytes)


def _raise(error: OSError) -> None:
    raise error


def _copy_tree(source: Path, target: Path, add_written: Callable[[int], None]) -> None:
    for folder, _, names in os.walk(source, onerror=_raise):
        copy = target / Path(folder).relative_to(source)
        copy.mkdir(parents=True, exist_ok=True)
        for name in names:
            with open(Path(folder) / name, "rb") as reader, open(copy / name, "wb") as writer:
                while block := reader.read(COPY_BYTES):
                    writer.write(block)
                    add_written(len(block))
            _copy_mode(Path(folder) / name, copy / name)
        if folder != str(source):
            _copy_mode(Path(folder), copy)


def _break_lines(path: Path, add_written: Callable[[int], None]) -> None:
    """Write a trainer's state as transformers does; its fields are sorted already."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.startswith(COMPACT):
        with open(path, "w", encoding="utf-8") as writer:
            for part in json.JSONEncoder(indent=2).iterencode(json.loads(text)):
                add_written(writer.write(part))
            writer.write("\n")


def _copy_mode(source: Path, target: Path) -> None:
    with suppress(PermissionError, NotImplementedError):  # some file systems have no modes
        shutil.copymode(source, target)


NICENESS = 10
"""Lower priority than training."""
PROGRESS_SECONDS = 0.5
"""Minimum time between two progress messages."""


class DrainProcess:
    """The drain worker process of one run. It is started by the first request and again after it died.

    Args:
        staging_path: the run's staging area.
        preloaded: fork the process from the forkserver that has imported torch, instead of spawning it.
    """

    def __init__(self, staging_path: Path, *, preloaded: bool) -> None:
        self._staging_path = staging_path
        self._preloaded = preloaded
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None if it was not started."""
        return None if self._process is None else int(self._process.pid)

    @property
    def server_has_ended(self) -> bool:
        """Whether the forkserver has ended, with all ranks that it had started. A start of the process
        waits for the imports of another one then.
        """
        return self._preloaded and forkserver.server_end(0.0) is not None

    def send(self, request: DrainRequest) -> None:
        """Send a request, starting the process if it is not alive.

        Raises:
            OSError, EOFError: the process could not be started, or died.
        """
        if self._process is None or not self._process.is_alive():
            self.stop(0.0)  # closes the connection of a dead process
            self._start()
        assert self._connection is not None
        self._connection.send(request)

    def receive(self, wait_seconds: float) -> DrainReply | None:
        """Return the next reply, or None if there is none within `wait_seconds`.

        Raises:
            OSError, EOFError: the process died or is not running.
        """
        if self._connection is None:
            raise EOFError("the drain worker is not running")
        if not self._connection.poll(wait_seconds):
            return None
        reply: DrainReply = self._connection.recv()
        return reply

    def stop(self, wait_seconds: float) -> None:
        """Close the connection, wait for the process to exit, and kill it after `wait_seconds`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.join(wait_seconds)
            if self._process.is_alive():
                # the partial directory it leaves is deleted by the next drain
                abandon(self._process)
            self._process = None

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self._preloaded else "spawn")
        self._connection, theirs = context.Pipe()
        if self._preloaded:
            forkserver.continue_server()
            with process_names.hidden_main():
                multiprocessing.forkserver.ensure_running()  # the process dies with this one
        parent = process_names.forkserver_pid() if self._preloaded else os.getpid()
        with theirs, process_names.hidden_main():
            process = context.Process(
                target=serve, args=(str(self._staging_path), theirs, parent), daemon=True
            )
            process.start()
        self._process = process  # not before: a process that was never started cannot be joined


def serve(staging_path: str, connection: Connection, parent: int) -> None:
    """Handle requests until the connection is closed. Entry point of the process.

    Args:
        staging_path: the run's staging area.
        connection: receives `DrainRequest`, sends `DrainReply`.
        parent: pid of the process to die with.
    """
    setproctitle.setproctitle("grpo-run drain worker")
    os.setsid()  # Ctrl-C at the terminal must reach the supervisor only
    die_with_parent(parent)
    os.nice(NICENESS)
    staging = StagingArea(Path(staging_path))
    while True:
        try:
            request = connection.recv()
            connection.send(handle_request(staging, request, _ProgressReporter(connection)))
        except (EOFError, OSError):
            return  # the supervisor closed the connection


class _ProgressReporter:
    """Sends progress messages when called, not too often."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent_at = time.monotonic()

    def __call__(self, written_bytes: int) -> None:
        now = time.monotonic()
        if now - self._sent_at >= PROGRESS_SECONDS:
            self._sent_at = now
            self._connection.send(DrainProgress(written_bytes=written_bytes))
