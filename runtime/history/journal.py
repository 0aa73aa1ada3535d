"""Append-only event log of one run: one JSON object per line, shared by the supervisor and the ranks.

A line is an event of `runtime/event.py`. Each line is written by one `write` call to a file opened with
O_APPEND, so lines of several processes do not mix. The file is opened for each line: a script may close
descriptors that it has not opened, and a run directory may be put back from a copy. Readers skip lines that a
crash truncated. Does not rotate the file and does not interpret events; `history.py` replays them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from grpo_run.runtime.event import (
    AnyEvent,
    Event,
    EventDecoder,
    encode,
    event_name,
    header_with,
    with_short_texts,
)
from grpo_run.watchdog.evidence.incident_files import read_end

MAX_LINE_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 16 * 1024
READ_BYTES = 4 * 1024 * 1024
"""How much of a journal is in memory at a time; one of a million steps has hundreds of megabytes."""


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One event as it is in the file, and its line without the newline."""

    event: Event
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

    def write(self, event: Event) -> bool:
        """Append one event, with the present time. Returns whether the disk accepted the whole line."""
        return self.append(self.entry(event))

    def entry(self, event: Event) -> JournalEntry:
        """Return an event with its line and the present time, without writing it.

        Texts longer than `MAX_TEXT_CHARACTERS` are cut, and a line longer than `MAX_LINE_BYTES` has the
        fields of every event only.
        """
        event = msgspec.structs.replace(
            event,
            time=round(self._wall(), 6),
            monotonic=round(self._monotonic(), 6),
            run=self._run_id,
            attempt=self.attempt if event.attempt is None else event.attempt,
        )
        line = encode(event)
        if len(line) > MAX_TEXT_CHARACTERS:
            event = with_short_texts(event, MAX_TEXT_CHARACTERS)
            line = encode(event)
        if len(line) >= MAX_LINE_BYTES:
            line = header_with(event, truncated_bytes=len(line))
        return JournalEntry(event=event, line=line)

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


class JournalReader:
    """Reads a journal from its beginning and continues as the file grows.

    Skips lines that are not valid events. If the file is truncated, what was appended before that is noticed
    is not read.

    Args:
        decoder: of the events that are read as such.
    """

    def __init__(self, path: Path, decoder: EventDecoder) -> None:
        self._path = path
        self._decoder = decoder
        self.position = 0
        """How many bytes of the file have been read."""
        self._partial_line = b""
        self._skipped: Counter[bytes] = Counter()

    def skip(self, line: bytes) -> None:
        """Do not yield the next line with exactly these bytes; the caller has handled its event."""
        self._skipped[line] += 1

    def new(self) -> Iterator[Event]:
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
                event = self._decoder.decode(line)
                if event is not None:
                    yield event

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


def read_newest(path: Path, kind: type[AnyEvent], max_bytes: int) -> Iterator[AnyEvent]:
    """Yield the events of one type in the last part of a journal, in file order; damaged ones are left out.

    Args:
        max_bytes: how much of the file's end is read.
    """
    try:
        end = read_end(path, max_bytes)
    except OSError:
        return
    decoder, name = EventDecoder((kind,)), f'"event":"{event_name(kind)}"'.encode()
    for line in end.split(b"\n")[len(end) == max_bytes :]:  # the first one may be a part
        event = decoder.decode(line) if name in line else None
        if isinstance(event, kind):
            yield event
