"""The journal: what happened, one JSON object a line, append only, shared by supervisor and ranks.

Every line carries `time` (wall, seconds), `monotonic` (seconds of this machine), `run`, `attempt`,
`rank`, `step`, `event` and the event's own fields. A line is one `write` to a descriptor opened for
appending, so lines of several processes do not mix; a line cut short by a crash is skipped by the reader.
Does not rotate and does not interpret: `history.py` folds it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 64 * 1024

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
        "plan_changed",
        "sample_excluded",
        "prompt_quarantined",
        "guard_tripped",
        "run_ended",
        "train_started",
        "train_ended",
        "train_restored",
        "rank_completed",
        "warning",
        "state_changed",
        "stop_requested",
        "generation_capped",
        "hygiene",
    ]
)


class Journal:
    """Appends events. One a process; cheap to open; safe to share the file between processes.

    Args:
        path: the file, created with mode 0600.
        run_id: written into every line.
        wall, monotonic: clocks in seconds, replaceable in tests.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.lost = 0
        """Writes that the disk did not take."""
        self._run_id = run_id
        self._wall = wall
        self._monotonic = monotonic
        self.attempt: int | None = None

    def _ends_within_a_line(self) -> bool:
        """Whoever wrote it, a crash or a full disk cut it short: its rest would swallow the next line."""
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(
        self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any
    ) -> dict[str, Any] | None:
        """Append one event. Fields must be JSON; floats that are not finite become null; long texts are cut.

        Returns:
            None when it is in the file; the event itself when the disk did not take it, which nobody will ever read.
        """
        assert event in EVENTS, f"unknown journal event {event!r}"
        record = {
            "time": round(self._wall(), 6),
            "monotonic": round(self._monotonic(), 6),
            "run": self._run_id,
            "attempt": self.attempt,
            "rank": rank,
            "step": step,
            "event": event,
            **{key: _plain(value) for key, value in fields.items()},
        }
        line = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")
        if len(line) >= MAX_LINE_BYTES:
            kept = {
                key: record[key] for key in ("time", "monotonic", "run", "attempt", "rank", "step", "event")
            }
            line = json.dumps({**kept, "truncated_bytes": len(line)}, separators=(",", ":")).encode()
        data = line + b"\n"
        try:
            if self._ends_within_a_line():
                data = b"\n" + data
            written = os.write(self._descriptor, data)
        except OSError:
            self.lost += 1  # a full or failing disk loses lines, not the run
            return record
        if written < len(data) - 1:  # its end alone comes with the next line
            self.lost += 1
            return record
        return None

    def sync(self) -> None:
        """Put what was written on disk; called at the events a resumed supervisor counts on.

        Network file systems say only here that they are full; the recovery under way must not stop for it.
        """
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        """Close the descriptor; further writes are an error."""
        os.close(self._descriptor)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= 16_384 else value[:16_384] + "…"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int)) or value is None:
        return value
    return str(value)


class JournalReader:
    """Reads a journal from its beginning and goes on as it grows, skipping lines that a crash cut short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have come since the last call, in order. A missing file is empty."""
        try:
            if os.stat(self._path).st_size == self._position:
                return
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:  # not there yet, or not to be had now: what it holds is read at a later look
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and "event" in record:
                yield record


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal in order; see `JournalReader`."""
    return JournalReader(path).new()
