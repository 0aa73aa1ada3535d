"""Keep a trainer's log history out of the files that every snapshot writes anew.

While a snapshot is taken, the trainer's state is written without its history, and entries that are not
written yet are appended to a segment in the staging area. When a call resumes from a snapshot in memory, the
state gets its history back. The format is in `runtime/snapshots/log_history.py`. Called by
`trainer_contents.py` and `runtime/rank/hooks/train_call.py`. Checkpoints that are written directly to disk
are not changed.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3
from transformers import TrainerState

from grpo_run.runtime.files import write_json
from grpo_run.runtime.rank.saving._spare_files import grant_memory
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.log_history import (
    LOG_HISTORY,
    SEGMENTS,
    Segment,
    pack,
    read_entries,
    read_segments,
    remove_unused,
)
from grpo_run.runtime.upstream.patches import override_attributes

SEGMENT_ENTRIES = 10_000
"""Entries of one segment; the drain worker needs memory for as many at once."""
COMPARED_ENTRIES = 64
"""Of so many of the last entries, the contents are compared; of earlier ones, whether they are still the
same objects."""


class LogHistory:
    """The log history of one `train()` call on this rank."""

    def __init__(self, session: Session) -> None:
        self._area = session.config.snapshot_directory
        self._is_main = session.is_main
        self._read: tuple[str, Any] | None = None
        self._begin([])

    def _begin(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._stored: list[Any] = []
        """The entries that the segments have."""
        self._last: deque[Any] = deque(maxlen=COMPARED_ENTRIES)
        """Copies of the last of them."""
        self._end_segment()

    def _end_segment(self) -> None:
        self._appendable, self._hasher = False, blake3()
        self._fields: tuple[str, ...] | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within the block, a state that is read from a snapshot has its history.

        Transformers reads it twice when a call begins; the second time costs nothing.
        """
        original: Any = TrainerState.load_from_json

        def load(cls: Any, json_path: str) -> Any:
            path = Path(os.path.abspath(json_path))
            before, self._read = self._read, None
            if before is not None and before[0] == str(path) and type(before[1]) is cls:
                return copy.copy(before[1])
            state = original.__func__(cls, json_path)
            if self._area is not None and path.is_relative_to(self._area):
                slot = path.parents[2]
                if segments := read_segments(slot):
                    with _no_collection():
                        state.log_history = list(itertools.chain(*read_entries(self._area, segments)))
                    self._begin(list(segments))
                    self._note_stored(state.log_history)
            self._read = str(path), state
            return state

        with override_attributes(TrainerState, load_from_json=classmethod(load)):
            yield

    @contextmanager
    def stored_apart(self, state: Any, folder: Path) -> Iterator[None]:
        """Within the block, `state` is written into a snapshot without its history.

        Args:
            state: the trainer's.
            folder: the directory of the checkpoint; outside the staging area, nothing changes.
        """
        area = self._area
        ours = self._is_main and area is not None and folder.is_relative_to(area)
        if not ours or getattr(type(state), "save_to_json", None) is not TrainerState.save_to_json:
            yield
            return

        def save(json_path: str) -> None:
            history = state.log_history
            try:
                segments = self._store(history)
            except (AttributeError, TypeError, ValueError, RecursionError):
                self._begin([])
                segments = []  # transformers writes more than JSON has, or raises its own error
            with override_attributes(state, log_history=[] if segments else history):
                TrainerState.save_to_json(state, json_path)
            if segments:
                slot = folder.parents[1]
                write_json(slot / LOG_HISTORY, [segment.model_dump() for segment in segments])

        with override_attributes(state, save_to_json=save):
            yield

    def _store(self, history: list[Any]) -> list[Segment]:
        """Write the entries that are not written yet, and return the segments of all.

        Raises:
            NoHeadroomError, OSError: there is no memory for them.
            AttributeError, TypeError, ValueError, RecursionError: an entry cannot be written as JSON.
        """
        count = len(self._stored)
        recent = history[max(0, count - COMPARED_ENTRIES) : count]
        if history[:count] != self._stored or recent != list(self._last):
            self._begin([])  # a callback has changed or removed entries
        while (count := len(self._stored)) < len(history):
            if not self._appendable or self._segments[-1].entries >= SEGMENT_ENTRIES:
                self._begin_segment()
            self._append(history[count : count + SEGMENT_ENTRIES - self._segments[-1].entries])
        return self._segments

    def _begin_segment(self) -> None:
        """Create a segment's file, and delete those that nothing refers to any more."""
        assert self._area is not None
        folder = self._area / SEGMENTS
        folder.mkdir(mode=0o700, exist_ok=True)
        remove_unused(self._area, self._segments)
        self._end_segment()
        self._segments.append(Segment(name=secrets.token_hex(8)))
        (folder / self._segments[-1].name).touch(0o600, exist_ok=False)
        self._appendable = True

    def _append(self, entries: list[Any]) -> None:
        assert self._area is not None
        segment, packed = self._segments[-1], pack(entries, self._fields)
        path = self._area / SEGMENTS / segment.name
        grant_memory(path.parent, len(packed.data))
        with open(path, "r+b") as file:
            file.seek(segment.size_bytes)  # an append that failed may have left something behind it
            file.write(packed.data)
        self._hasher.update(packed.data)
        self._fields = packed.fields
        self._segments[-1] = Segment(
            name=segment.name,
            values=segment.values + packed.values,
            entries=segment.entries + len(entries),
            size_bytes=segment.size_bytes + len(packed.data),
            text_bytes=segment.text_bytes + packed.text_bytes,
            blake3=self._hasher.hexdigest(),
        )
        self._note_stored(entries)

    def _note_stored(self, entries: list[Any]) -> None:
        self._stored += entries
        self._last.extend(map(copy.deepcopy, entries[-COMPARED_ENTRIES:]))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without automatic garbage collection, reading takes half the time; there is nothing to collect."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
