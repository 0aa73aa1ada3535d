"""Append-only event log of one run: one JSON object per line, shared by the supervisor and the ranks.

Every line contains `time` (seconds since the epoch), `monotonic` (seconds of this machine's clock), `run`,
`attempt`, `rank`, `step`, `event` and the fields of the event. Each line is written by one `write` call to a
descriptor opened with O_APPEND, so lines of several processes do not mix. A script may close that descriptor
and get its number for a file of its own, so each write checks whose file it is. Readers skip lines that a
crash truncated. Does not rotate the file and does not interpret events; `history.py` replays them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import is_open_at, move_directory_away, replace_file

MAX_LINE_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 16 * 1024
READ_BYTES = 4 * 1024 * 1024
"""How much of a journal is in memory at a time; one of a million steps has hundreds of megabytes."""

_NOT_OPEN = -1

EVENTS = frozenset(
    [
        "run_started",
        "attempt_started",
        "rank_started",
        "phase_learned",
        "step_committed",
        "step_logged",
        "vote_failed",
        "checkpoint_staged",
        "checkpoint_published",
        "checkpoint_rejected",
        "checkpoint_failed",
        "snapshot_interval",
        "suspicion",
        "fault_injected",
        "incident",
        "action",
        "attempt_ended",
        "processes_ended",
        "plan_changed",
        "memory_plan_given",
        "sample_masked",
        "group_masked",
        "rewards_repeated",
        "nan_read_as_none",
        "prompt_quarantined",
        "guard_tripped",
        "reseeded",
        "rolled_back",
        "run_ended",
        "resume_chosen",
        "resume_missed",
        "fresh_interpreters",
        "train_started",
        "train_ended",
        "train_restored",
        "loop_left",
        "model_saved",
        "rank_completed",
        "warning",
        "state_changed",
        "stop_requested",
        "generation_capped",
        "memory_plan_applied",
        "micro_batches_split",
        "tool_cancelled",
        "completions_capped",
        "rollout_ended",
        "rollout_timed_out",
        "trains_without_trainer",
        "state_saved",
        "script_checkpoint",
        "cleanup",
        "memory_short",
        "memory_freed",
        "memory_restart",
        "memory_oom_suspected",
        "memory_finding",
        "memory_snapshot",
        "reward_moved",
        "reward_failed",
        "reward_latency",
        "reward_worker_replaced",
        "tracker_run",
    ]
)


CLOSED = (
    "the script has closed file descriptors that it has not opened, that of the journal among them; let it"
    " close only its own"
)


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One event: the record, and the line that represents it in the file (without the newline)."""

    record: dict[str, Any]
    line: bytes


class Journal:
    """Writer of one process. Several processes may append to the same file, each with a writer of its own.

    A process that was forked from the writer's writes nothing: it has no part in the run.

    Args:
        path: the file; created with mode 0600.
        run_id: written into every line.
        required: whether a file that cannot be opened is an error, and not only a loss of events.
        wall, monotonic: clocks in seconds; tests replace them.

    Raises:
        OSError: a file that is required cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        required: bool = True,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = os.getpid()
        self._path = path
        self._descriptor, self._identity = _NOT_OPEN, (0, 0)
        try:
            self._open()
        except OSError:
            if required:
                raise
        self.lost = 0
        """Number of writes and fsyncs that failed."""
        self._run_id = run_id
        self._wall = wall
        self._monotonic = monotonic
        self.attempt: int | None = None

    def write(self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> bool:
        """Append one event.

        Args:
            fields: JSON values. Floats that are not finite become null, long strings are truncated, and other
                objects are converted with `str`.

        Returns:
            whether the disk accepted the whole line.
        """
        return self.append(self.entry(event, rank=rank, step=step, **fields))

    def entry(
        self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any
    ) -> JournalEntry:
        """Build an event with the present time, without writing it. Arguments as in `write`.

        A record longer than `MAX_LINE_BYTES` is written without the fields of the event.
        """
        assert event in EVENTS, f"unknown journal event {event!r}"
        header = {
            "time": round(self._wall(), 6),
            "monotonic": round(self._monotonic(), 6),
            "run": self._run_id,
            "attempt": self.attempt,
            "rank": rank,
            "step": step,
            "event": event,
        }
        record = {**header, **{key: _json_value(value) for key, value in fields.items()}}
        line = _encode(record)
        if len(line) >= MAX_LINE_BYTES:
            line = _encode({**header, "truncated_bytes": len(line)})
        return JournalEntry(record=record, line=line)

    def append(self, entry: JournalEntry) -> bool:
        """Append an event built by `entry`. Returns whether the disk accepted the whole line.

        A full or failing disk loses events, not the run: no error is raised, and `lost` is incremented.
        """
        if os.getpid() != self._pid:
            return True
        data = entry.line + b"\n"
        try:
            if self._last_line_is_open(self._size_bytes()):
                data = b"\n" + data
            written = os.write(self._descriptor, data)
        except OSError:
            self.lost += 1
            return False
        if written < len(data) - 1:  # a missing newline alone is added by the next writer
            self.lost += 1
            return False
        return True

    def sync(self) -> None:
        """Fsync the file. Called after events that the next supervisor relies on.

        A network file system may report a full disk only here. The failure is counted in `lost` and does not
        interrupt a recovery.
        """
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        """Close the file. The journal must not be written to afterwards."""
        os.close(self._descriptor)

    def read(self, position: int, size_bytes: int) -> tuple[bytes, int]:
        """Return bytes of the file that is written to, whatever its path names by now, and the size of the
        file.

        Raises:
            OSError: it cannot be read.
        """
        total = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size_bytes, position) if total > position else b"", total

    def restore(self) -> None:
        """Give the file its path again if that was removed, moved or replaced: the next ranks open it by its
        path.

        No rank may be running. What cannot be restored is lost, as on a full disk.
        """
        if self._descriptor == _NOT_OPEN or is_open_at(self._descriptor, self._path):
            return
        try:
            content = b"".join(self._blocks())
            move_directory_away(self._path)
            replace_file(self._path, content)
            old = self._descriptor
            self._open()
            os.close(old)
        except OSError:
            self.lost += 1

    def _blocks(self) -> Iterator[bytes]:
        position = 0
        while block := os.pread(self._descriptor, READ_BYTES, position):
            position += len(block)
            yield block

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        status = os.fstat(descriptor)
        self._descriptor, self._identity = descriptor, (status.st_dev, status.st_ino)

    def _size_bytes(self) -> int:
        """Return the size of the file.

        Raises:
            RunDirectoryError: the descriptor is not its own any more; it may belong to a file of the script.
        """
        if self._descriptor == _NOT_OPEN:
            self._open()
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            raise RunDirectoryError(CLOSED) from None
        if (status.st_dev, status.st_ino) != self._identity:
            raise RunDirectoryError(CLOSED)
        return status.st_size

    def _last_line_is_open(self, size: int) -> bool:
        """Whether the file ends without a newline, because a crash or a full disk truncated the last line."""
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_CHARACTERS else value[:MAX_TEXT_CHARACTERS] + "…"
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, (bool, int)) or value is None:
        return value
    return str(value)


class JournalReader:
    """Reads a journal from its beginning and continues as the file grows.

    Skips lines that are not valid events. If the file is truncated, what was appended before that is noticed
    is not read.

    Args:
        path: of the journal.
        writer: read the file that this one writes to, also if the path names another one later.
    """

    def __init__(self, path: Path, writer: Journal | None = None) -> None:
        self._path = path
        self._writer = writer
        self._position = 0
        self._partial_line = b""
        self._skipped: Counter[bytes] = Counter()

    def skip(self, line: bytes) -> None:
        """Do not yield the next line with exactly these bytes; the caller has handled its event."""
        self._skipped[line] += 1

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events appended since the last call, in file order. A missing file has no events."""
        while data := self._read():
            self._position += len(data)
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            # a line of this length is not an event; do not keep all of a file without newlines
            self._partial_line = self._partial_line[-2 * MAX_LINE_BYTES :]
            for line in lines:
                if self._skipped[line] > 0:
                    self._skipped -= Counter([line])
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict) and "event" in record:
                    yield record

    def _read(self) -> bytes:
        """Return the next part of the file; nothing if it has not grown."""
        try:
            if self._writer is not None:
                data, size = self._writer.read(self._position, READ_BYTES)
            else:
                data, size = self._read_path()
        except OSError:  # not created yet, or temporarily unreadable: the next call reads these events
            return b""
        if size < self._position:  # part of what is there now may have been read before
            self._position, self._partial_line = size, b""
        return data

    def _read_path(self) -> tuple[bytes, int]:
        size = os.stat(self._path).st_size
        if size <= self._position:
            return b"", size  # called often: do not open a file that has not grown
        with open(self._path, "rb") as file:
            file.seek(self._position)
            return file.read(READ_BYTES), size


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all events of a journal in file order. See `JournalReader.new`."""
    return JournalReader(path).new()


def read_newest(path: Path, event: str, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one name in the last part of a journal, in file order.

    Args:
        max_bytes: how much of the file's end is read.
    """
    try:
        with open(path, "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - max_bytes)
            file.seek(begin)
            lines = file.read(max_bytes).split(b"\n")
    except OSError:
        return
    name = f'"event":"{event}"'.encode()
    for line in lines[1 if begin else 0 :]:
        if name not in line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("event") == event:
            yield record
