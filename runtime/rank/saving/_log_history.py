"""Keep a trainer's log history out of the files that every snapshot writes anew.

While a snapshot is taken, the trainer's state is written without its history, and entries that no segment has
yet are written beside it. When a call resumes from a snapshot in memory, the state gets its history back. The
format is in `runtime/snapshots/log_history.py`. Called by `trainer_contents.py` and
`runtime/rank/hooks/train_call.py`. Checkpoints that are written directly to disk are not changed.
"""

from __future__ import annotations

import copy
import itertools
import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState

from grpo_run.runtime.files import write_json
from grpo_run.runtime.rank.saving._spare_files import grant_memory
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.log_history import (
    LOG_HISTORY,
    SEGMENTS,
    TAIL,
    Segment,
    as_read_back,
    pack,
    read_entries,
    read_segments,
    remove_unused,
)
from grpo_run.runtime.upstream.patches import override_attributes

SEGMENT_ENTRIES = 1000
"""Every snapshot writes fewer entries than these anew, in a millisecond."""
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
        self._tail: list[dict[str, Any]] = []
        self._stored: list[Any] = []
        """The trainer's entries that the segments and the tail have."""
        self._last: deque[Any] = deque(maxlen=COMPARED_ENTRIES)
        """The last of them, as they were."""

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
                    state.log_history = list(itertools.chain(*read_entries(self._area, segments)))
                    *full, tail = segments
                    self._begin(full)
                    self._tail = next(read_entries(self._area, [tail]))
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
            history, slot = state.log_history, folder.parents[1]
            try:
                segments = self._store(history, slot) if history else []
            except (AttributeError, TypeError, ValueError, RecursionError):
                self._begin([])
                segments = []  # transformers writes it nevertheless, or raises its own error
            with override_attributes(state, log_history=[] if segments else history):
                TrainerState.save_to_json(state, json_path)
            if segments:
                write_json(slot / LOG_HISTORY, [segment.model_dump() for segment in segments])

        with override_attributes(state, save_to_json=save):
            yield

    def _store(self, history: list[Any], slot: Path) -> list[Segment]:
        """Write the entries that no segment has yet, and return the segments of all.

        Raises:
            NoHeadroomError, OSError: there is no memory for them.
            AttributeError, TypeError, ValueError, RecursionError: an entry cannot be written as JSON.
        """
        count = len(self._stored)
        recent = list(map(as_read_back, history[max(0, count - COMPARED_ENTRIES) : count]))
        if history[:count] != self._stored or recent != list(self._last):
            self._begin([])  # a callback has changed or removed entries
        new = history[len(self._stored) :]
        self._tail += list(map(as_read_back, new))
        self._note_stored(new)
        if len(self._tail) >= SEGMENT_ENTRIES:
            (slot.parent / SEGMENTS).mkdir(mode=0o700, exist_ok=True)
            remove_unused(slot.parent, self._segments)
            while len(self._tail) >= SEGMENT_ENTRIES:
                self._segments.append(self._write(f"{SEGMENTS}/{secrets.token_hex(8)}", SEGMENT_ENTRIES))
                del self._tail[:SEGMENT_ENTRIES]
        return [*self._segments, self._write(f"{slot.name}/{TAIL}", SEGMENT_ENTRIES)]

    def _write(self, path: str, count: int) -> Segment:
        """Write the first `count` entries of the tail into a file of the staging area."""
        assert self._area is not None
        segment, data = pack(path, self._tail[:count])
        target = self._area / path
        grant_memory(target.parent, len(data))
        target.write_bytes(data)
        return segment

    def _note_stored(self, entries: list[Any]) -> None:
        self._stored += entries
        self._last.extend(map(as_read_back, entries[-COMPARED_ENTRIES:]))
