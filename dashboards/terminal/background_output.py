"""Standard output and error of `grpo-run launch`, written by a thread, so that a reader that stops does not
stop the supervisor.

A terminal that was stopped by Ctrl-S or is in the copy mode of a terminal multiplexer, a pager, and a
connection that hangs take no more output once a few kilobytes are waiting, for hours. A write would block,
and with it the recovery from the next fault and the reaction to Ctrl-C. Installed by
`cli/launching/_display.py` for the time of a run; `terminal.py` does not know of it. Does not format. What
does not fit is dropped and counted; the journal has it. Output of ranks is left in their files until there is
room.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

MAX_WAITING_BYTES = 16 << 20
"""Output that waits for a reader, for both streams; a reader that is only slow gets all of it."""
WRITE_BYTES = 64 << 10
"""Bytes of one write, so that progress of a slow reader is noticed."""
PATIENCE_SECONDS = 30.0
"""How long the end of a run waits for a reader that takes nothing."""
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _FilePart:
    """A part of a file, which the thread reads when it is its turn."""

    path: Path
    start: int
    end: int


class BackgroundOutput:
    """Writes to descriptors, in the order of the calls, in a thread of its own, which starts with the first
    text.

    Args:
        max_bytes: how much may wait.
    """

    def __init__(self, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, bytes | _FilePart]] = deque()
        self._is_writing = False
        self._size = 0
        self._dropped = 0
        self._failures: dict[int, OSError] = {}
        self._wrote_at = time.monotonic()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def stream(self, stream: TextIO) -> TextIO:
        """Return a stream that stands in for another one; the same one if that has no descriptor."""
        try:
            stream.flush()
            return BackgroundStream(self, stream)  # type: ignore[return-value]
        except (AttributeError, OSError, ValueError):
            return stream

    def write(self, descriptor: int, data: bytes) -> None:
        """Let the thread write data. Never blocks.

        Raises:
            OSError: an earlier write to this descriptor has failed, as when its reader is gone.
        """
        with self._changed:
            failure = self._failures.get(descriptor)
            if failure is not None:
                raise failure
            if not data:
                return
            if self._size + len(data) > self._max_bytes:
                self._dropped += len(data)
                return
            if self._dropped:
                note = (
                    f"... {self._dropped / 1e6:.1f} MB of output were not shown: nothing read them\n".encode()
                )
                self._dropped = 0
                self._append(descriptor, note)
            self._append(descriptor, data)

    @property
    def has_room(self) -> bool:
        """Whether most of what may wait still fits."""
        return self._size < self._max_bytes // 4

    def write_file(self, descriptor: int, path: Path, start: int) -> None:
        """Let the thread write a file from a position to its present end, without reading it before its
        turn.
        """
        with contextlib.suppress(OSError), self._changed:
            if (end := os.stat(path).st_size) > start:
                self._append(descriptor, _FilePart(path, start, end))

    def finish(self, interrupted: Callable[[], bool], patience_seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait until everything is written, but no longer than `patience_seconds` for a reader that takes
        nothing.

        Args:
            interrupted: whether the user wants the wait to end.

        Returns:
            whether everything is written.
        """
        began = time.monotonic()
        with self._changed:
            while (self._waiting or self._is_writing) and not interrupted():
                if time.monotonic() - max(began, self._wrote_at) > patience_seconds:
                    break
                self._changed.wait(POLL_SECONDS)
            return not (self._waiting or self._is_writing)

    def _append(self, descriptor: int, data: bytes | _FilePart) -> None:
        self._waiting.append((descriptor, data))
        self._size += len(data) if isinstance(data, bytes) else 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, daemon=True, name="grpo-run-write")
            self._thread.start()
        self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                descriptor, data = self._waiting.popleft()
                self._is_writing = True
            try:
                if descriptor not in self._failures:
                    for part in _parts(data):
                        _write_all(descriptor, part, self._note_progress)
            except OSError as error:
                with self._changed:
                    self._failures[descriptor] = error
            with self._changed:
                self._is_writing = False
                self._size -= len(data) if isinstance(data, bytes) else 0
                self._changed.notify_all()

    def _note_progress(self) -> None:
        self._wrote_at = time.monotonic()


class BackgroundStream(io.TextIOBase):
    """A text stream that stands in for standard output or error.

    Args:
        output: writes its text.
        stream: that it stands in for.
    """

    def __init__(self, output: BackgroundOutput, stream: TextIO) -> None:
        self._output = output
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the bytes that are written; rich draws lines accordingly."""
        return self._encoding

    def write(self, text: str) -> int:
        """Let the text be written."""
        self._output.write(self._descriptor, text.encode(self._encoding, errors="replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Let bytes be written."""
        self._output.write(self._descriptor, data)

    def write_file(self, path: Path, start: int) -> None:
        """Let a file be written from a position to its present end."""
        self._output.write_file(self._descriptor, path, start)

    @property
    def has_room(self) -> bool:
        """Whether the reader has taken most of what was written."""
        return self._output.has_room

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a terminal shows the text."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True


def _parts(data: bytes | _FilePart) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    position = data.start
    while position < data.end:
        try:
            with open(data.path, "rb") as file:
                file.seek(position)
                part = file.read(min(data.end - position, WRITE_BYTES))
        except OSError:
            return  # the disk fails, or the file was removed
        if not part:
            return
        position += len(part)
        yield part


def _write_all(descriptor: int, data: bytes, note_progress: Callable[[], None]) -> None:
    view = memoryview(data)
    while view:
        try:
            written = os.write(descriptor, view[:WRITE_BYTES])
        except BlockingIOError as error:  # another process has made the terminal non-blocking
            if error.errno != errno.EAGAIN:
                raise
            room = select.poll()  # select() refuses descriptors from 1024 on
            room.register(descriptor, select.POLLOUT)
            room.poll()
            continue
        view = view[written:]
        note_progress()
