"""The drainer: a process of its own that turns a snapshot in memory into a durable checkpoint.

    memory slot  ->  <output_dir>/.checkpoint-N.partial-…  ->  fsync, digests, MANIFEST.json  ->  rename to checkpoint-N

Its requests and answers are plain dataclasses over a connection; the supervisor sends them (`drain_scheduler.py`) and never
touches the disk itself, so a file system that hangs holds nobody up but this process. What is written is, byte for byte,
what the trainer would have written. It dies with the supervisor; a partial directory it leaves behind is cleaned
up by the next one. Chooses nothing: which snapshot is made durable when is the supervisor's decision.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import setproctitle

from grpo_run.runtime.checkpoints import manifest as checkpoints
from grpo_run.runtime.checkpoints.publishing import clean_partials, partial_directory, publish
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.processes.parent_death import die_with_parent
from grpo_run.runtime.staging.buffer import ArenaReader
from grpo_run.runtime.staging.headroom import tightest
from grpo_run.runtime.staging.index import Image, read_image
from grpo_run.runtime.staging.slots import Slot, Staged, Staging
from grpo_run.runtime.staging.writer import write_files

NICENESS = 10
"""Training comes first."""
PROGRESS_SECONDS = 0.5
WATCH_SECONDS = 5.0
"""Between two looks at whether bytes move; well below what counts as a stall."""
COPY_BYTES = 8 << 20
SYNC_BYTES = 1 << 30
"""Put on disk at a time: one fsync of everything at the end could take minutes, and would look like a stall."""
ROOM_RESERVE_BYTES = 64 << 20
"""Left free on the disk: the journal, logs and incidents of the run need some."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Make the snapshot in a slot durable where its script wants it; or loadable in memory, under `restore`."""

    slot: int
    restore: str | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Bytes written so far of the present request."""

    written_bytes: int


@dataclass(frozen=True, kw_only=True)
class Published:
    """It is there, digested and complete."""

    slot: int
    step: int
    train_call: int
    path: str
    scheduled: bool
    size_bytes: int
    seconds: float
    durable: bool
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failed:
    """It is not, and nothing half-written is left to be seen.

    `step` is None when there was nothing to write; `full` says that there was no room, `broken` that the snapshot
    itself cannot be read, so that there is no use in trying again.
    """

    slot: int
    step: int | None
    reason: str
    full: bool
    broken: bool = False


Answer = Progress | Published | Failed


def serve(staging_path: str, connection: Connection, parent: int) -> None:
    """Answer requests until the other end is closed. The process' entry point.

    Args:
        staging_path: the run's slots.
        connection: requests in, answers out.
        parent: dies with it.
    """
    setproctitle.setproctitle("grpo-run drainer")
    os.setsid()  # a Ctrl-C at the terminal is the supervisor's to hear
    die_with_parent(parent)
    os.nice(NICENESS)
    staging = Staging(Path(staging_path))
    while True:
        try:
            request = connection.recv()
            report = _Reporter(connection)
            with report.watching():
                answered = answer(staging, request, report)
            connection.send(answered)
        except (EOFError, OSError):
            return  # the other end is closed


class _Reporter:
    """Says how far it is: when it is told, and when bytes move although nobody tells.

    One record of an archive is written by one call of torch, which may take minutes; the kernel counts meanwhile.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._one_at_a_time = threading.Lock()
        self._said_at = time.monotonic()
        self._bytes = 0

    def __call__(self, written_bytes: int) -> None:
        self._bytes = written_bytes
        with self._one_at_a_time:
            now = time.monotonic()
            if now - self._said_at >= PROGRESS_SECONDS:
                self._said_at = now
                self._connection.send(Progress(written_bytes=written_bytes))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread's bytes while the block runs; nothing is said any more when it is left."""
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(threading.get_native_id(), over), name="progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, thread_id: int, over: threading.Event) -> None:
        before = _moved(thread_id)
        while not over.wait(WATCH_SECONDS):
            now = _moved(thread_id)
            if now != before:
                before = now
                try:
                    self(self._bytes)
                except OSError:
                    return  # the other end is closed: who writes finds that out as well


def _moved(thread_id: int) -> bytes | None:
    """A thread's counts of bytes (`proc_pid_io(5)`), None without them. One thread's: looking and saying count too."""
    try:
        return Path(f"/proc/self/task/{thread_id}/io").read_bytes()
    except OSError:
        return None  # a kernel without them: what the writer itself reports must do


def answer(staging: Staging, request: Request, report: Callable[[int], None]) -> Published | Failed:
    """Do what one request asks; every failure that a file system can cause is an answer."""
    slot = staging.slots[request.slot]
    step = None
    try:
        with slot.locked(wait_seconds=30.0) as mine:
            if not mine:
                return Failed(slot=slot.index, step=None, reason="the slot is being written", full=False)
            with _of_the_snapshot():
                staged = slot.staged()
            if staged is None:
                return Failed(slot=slot.index, step=None, reason="the slot is empty", full=False)
            step = staged.step
            return _drain(slot, staged, request.restore, report)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = f" ({error.filename})" if error.filename else ""
        return Failed(slot=slot.index, step=step, reason=f"{error.strerror or error}{where}", full=full)
    except _BrokenSnapshotError as error:
        return Failed(slot=slot.index, step=step, reason=str(error), full=False, broken=True)
    except CheckpointError as error:  # of what was just written: the disk's doing, another time it may work
        return Failed(slot=slot.index, step=step, reason=str(error), full=False)


class _BrokenSnapshotError(CheckpointError):
    """What is in memory cannot be read; the disk has nothing to do with it."""


@contextmanager
def _of_the_snapshot() -> Iterator[None]:
    """Inside, a checkpoint's error is the snapshot's."""
    try:
        yield
    except CheckpointError as error:
        raise _BrokenSnapshotError(str(error)) from error


def _drain(slot: Slot, staged: Staged, restore: str | None, report: Callable[[int], None]) -> Published:
    began = time.perf_counter()
    durable = restore is None
    directory = Path(staged.output_dir if restore is None else restore)
    plain = slot.files / staged.folder
    with _of_the_snapshot():
        images = [read_image(slot.image(rank)) for rank in range(staged.world_size)]
        needed = _plain_bytes(plain) + sum(image.size_bytes for image in images)
    directory.mkdir(parents=True, exist_ok=True)
    clean_partials(directory)
    _require_room(directory, needed, durable=durable)
    final = directory / staged.folder
    with partial_directory(directory, staged.step) as partial:
        written = _Written(report, partial)
        _copy_plain(plain, partial, written)
        for rank, image in enumerate(images):
            with _of_the_snapshot():
                _write_image(slot.arena(rank), image, partial, written)
        manifest = checkpoints.write_manifest(partial, staged, progress=written.is_read)
        publish(partial, final)
    if durable:
        slot.mark_drained()
    try:
        removed = rotate(directory, newest=final, limit=staged.limit, best=staged.best)
    except (OSError, CheckpointError):
        removed = []  # published all the same; the next one rotates
    return Published(
        slot=slot.index,
        step=staged.step,
        train_call=staged.train_call.ordinal,
        path=str(final),
        scheduled=staged.scheduled,
        size_bytes=manifest.size_bytes,
        seconds=time.perf_counter() - began,
        durable=durable,
        removed=tuple(map(str, removed)),
    )


class _Written:
    """Adds up bytes and passes the sum on, of what the disk has taken as far as `SYNC_BYTES`."""

    def __init__(self, report: Callable[[int], None], partial: Path) -> None:
        self._report = report
        self._partial = partial
        self._bytes = self._synced = 0

    def __call__(self, count: int) -> None:
        self._bytes += count
        if self._bytes - self._synced >= SYNC_BYTES:
            checkpoints.sync_tree(self._partial, self.is_read)
            self._synced = self._bytes
        self._report(self._bytes)

    def is_read(self, count: int) -> None:
        """Some of it was synced, or read back for its digest: the disk is at work, though no more is written."""
        self._report(self._bytes)


def _require_room(directory: Path, needed: int, *, durable: bool) -> None:
    if durable:
        room = shutil.disk_usage(directory).free - ROOM_RESERVE_BYTES
    else:
        room = tightest(directory).usable_bytes  # memory runs out by a kill, not by an error
    if room < needed:
        raise OSError(
            errno.ENOSPC,
            f"{needed >> 20} MiB are needed and {max(0, room) >> 20} MiB may be taken",
            str(directory),
        )


def _raise(error: OSError) -> None:
    raise error


def _plain_bytes(source: Path) -> int:
    try:
        return sum(
            os.stat(os.path.join(folder, name)).st_size
            for folder, _, names in os.walk(source, onerror=_raise)
            for name in names
        )
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}") from error


def _copy_plain(source: Path, target: Path, written: Callable[[int], None]) -> None:
    for folder, _, names in os.walk(source, onerror=_raise):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in names:
            with open(Path(folder) / name, "rb") as reader, open(here / name, "wb") as writer:
                while block := reader.read(COPY_BYTES):
                    writer.write(block)
                    written(len(block))
            with suppress(PermissionError, NotImplementedError):  # a file system that has no modes
                shutil.copymode(Path(folder) / name, here / name)


def _write_image(source: Path, image: Image, target: Path, written: Callable[[int], None]) -> None:
    if not image.files:
        return
    with ArenaReader(source) as arena:
        try:
            write_files(image, arena, target, progress=written)
        except RuntimeError as error:  # torch's writer keeps the number of the error to itself
            # the reserve was free when this began
            full = shutil.disk_usage(target).free < ROOM_RESERVE_BYTES
            number = errno.ENOSPC if full else errno.EIO
            raise OSError(number, f"{os.strerror(number)}: {' '.join(str(error).split())[:200]}") from error
