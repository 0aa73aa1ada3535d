"""Append-only event log of one run: one JSON object per line, shared by the supervisor and the ranks.

Every line contains `time` (seconds since the epoch), `monotonic` (seconds of this machine's clock), `run`,
`attempt`, `rank`, `step`, `event` and the fields of the event. Each line is written by one `write` call to a
file opened with O_APPEND, so lines of several processes do not mix. The file is opened for each line: a
script may close descriptors that it has not opened, and a run directory may be put back from a copy. Readers
skip lines that a crash truncated. Does not rotate the file and does not interpret events; `history.py`
replays them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from grpo_run.watchdog.evidence.incident_files import read_end

MAX_LINE_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 16 * 1024
READ_BYTES = 4 * 1024 * 1024
"""How much of a journal is in memory at a time; one of a million steps has hundreds of megabytes."""

EVENTS = frozenset((
    "run_started", "attempt_started", "rank_started", "phase_learned", "rank_counted", "step_committed",
    "step_logged", "checkpoint_staged", "checkpoint_published", "checkpoint_rejected",
    "checkpoint_failed", "snapshot_interval", "suspicion", "fault_injected", "incident", "action",
    "attempt_ended", "processes_ended", "plan_changed", "memory_plan_given", "sample_masked", "group_masked",
    "rewards_repeated", "nan_read_as_none", "prompt_quarantined", "guard_tripped", "reseeded", "rolled_back",
    "run_ended", "resume_chosen", "resume_missed", "fresh_interpreters", "train_started", "train_ended",
    "train_restored", "loop_left", "model_saved", "rank_completed", "warning", "state_changed",
    "stop_requested", "generation_capped", "memory_plan_applied", "tool_cancelled",
    "completions_capped", "rollout_ended", "rollout_timed_out", "trains_without_trainer", "state_saved",
    "script_checkpoint", "cleanup", "memory_short", "memory_freed", "memory_restart", "memory_oom_suspected",
    "memory_finding", "memory_snapshot", "reward_moved", "reward_failed", "reward_latency",
    "reward_worker_replaced", "tracker_run", "growth_found", "phase_costs",
))  # fmt: skip


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
        wall, monotonic: clocks in seconds; tests replace them.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = os.getpid()
        self._path = path.absolute()  # the script may change its working directory
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
            with self._opened() as descriptor:
                size = os.fstat(descriptor).st_size
                # a crash or a full disk has truncated the last line
                if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
                    data = b"\n" + data
                written = os.write(descriptor, data)
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
            with self._opened() as descriptor:
                os.fsync(descriptor)
        except OSError:
            self.lost += 1

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


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


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        record = from_json(line, cache_strings="keys")  # a third of the time of json.loads
    except ValueError:
        try:
            record = json.loads(line)  # accepts half of a surrogate pair, as a path may have one
        except (ValueError, RecursionError):
            return None
    return record if isinstance(record, dict) and "event" in record else None


class JournalReader:
    """Reads a journal from its beginning and continues as the file grows.

    Skips lines that are not valid events. If the file is truncated, what was appended before that is noticed
    is not read.

    Args:
        path: of the journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.position = 0
        """How many bytes of the file have been read."""
        self._partial_line = b""
        self._skipped: Counter[bytes] = Counter()

    def skip(self, line: bytes) -> None:
        """Do not yield the next line with exactly these bytes; the caller has handled its event."""
        self._skipped[line] += 1

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events appended since the last call, in file order. A missing file has no events."""
        while data := self._read():
            self.position += len(data)
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            # a line of this length is not an event; do not keep all of a file without newlines
            self._partial_line = self._partial_line[-2 * MAX_LINE_BYTES :]
            for line in lines:
                if self._skipped and self._skipped[line] > 0:
                    self._skipped -= Counter([line])
                    continue
                record = _decoded(line)
                if record is not None:
                    yield record

    def _read(self) -> bytes:
        """Return the next part of the file; nothing if it has not grown."""
        try:
            size = os.stat(self._path).st_size
            if size < self.position:  # part of what is there now may have been read before
                self.position, self._partial_line = size, b""
            if size == self.position:
                return b""  # called often: do not open a file that has not grown
            with open(self._path, "rb") as file:
                file.seek(self.position)
                return file.read(READ_BYTES)
        except OSError:  # not created yet, or temporarily unreadable: the next call reads these events
            return b""


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all events of a journal in file order. See `JournalReader.new`."""
    return JournalReader(path).new()


def read_newest(path: Path, event: str, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one name in the last part of a journal, in file order.

    Args:
        max_bytes: how much of the file's end is read.
    """
    try:
        end = read_end(path, max_bytes)
    except OSError:
        return
    name = f'"event":"{event}"'.encode()
    for line in end.split(b"\n")[len(end) == max_bytes :]:  # the first one may be a part
        record = _decoded(line) if name in line else None
        if record is not None and record["event"] == event:
            yield record
