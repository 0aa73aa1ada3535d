"""Kept exceptions, which hold the local variables of the functions that they were raised through.

Used by `tracer.py`. A traceback refers to the frames of functions that have ended, and those to their local
variables.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Collection, Iterable
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace import _growth as growth
from grpo_run.runtime.rank.memory_trace._census import Census, Ledger, StorageEntry, storage_of
from grpo_run.runtime.rank.memory_trace._names import Name, name_of
from grpo_run.runtime.rank.memory_trace._referrers import reached, referrers, running_frames, running_locals

MOST_HELD = 200
"""Objects below one local variable that are looked at."""
MOST_FRAMES = 64
"""Frames between the one that has raised an exception and the exception."""


class KeptException(NamedTuple):
    """A line at which exceptions were raised, or passed on, that something keeps.

    Args:
        file: of the frame.
        line: in it.
        function: of the frame.
        error: class of the exception.
        name: of what keeps it; None if it has none.
        entries: what its local variables hold.
        steps: in how many steps there was one.
    """

    file: str
    line: int
    function: str
    error: str
    name: Name | None
    entries: list[StorageEntry]
    steps: int


class KeptExceptions:
    """Counts in how many steps exceptions of each line were kept.

    Attributes:
        suspicious: storages that such exceptions hold, of lines that were seen in a few steps.
    """

    def __init__(self) -> None:
        self.suspicious: list[StorageEntry] = []
        self._steps: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._found: set[tuple[str, int]] = set()

    def step_ended(
        self, step: int, census: Census, ledger: Ledger, kinds: Collection[type]
    ) -> list[KeptException]:
        """Return what was kept in enough steps, each line once."""
        by_place: dict[tuple[str, int], dict[int, TracebackType]] = defaultdict(dict)
        running = running_frames()
        for traceback in census.tracebacks:
            frame = traceback.tb_frame
            if id(frame) not in running:
                for key in _held_by(frame, kinds):
                    by_place[frame.f_code.co_filename, traceback.tb_lineno][key] = traceback
        self.suspicious, found = [], []
        for place, held in by_place.items():
            entries = ledger.of(held)
            if not entries:
                continue
            steps = self._steps[place]
            steps.add(step)
            if len(steps) < growth.SUSPICIOUS:
                continue
            self.suspicious += entries
            if len(steps) >= growth.ENOUGH and place not in self._found:
                self._found.add(place)
                kept = next(iter(held.values()))
                error, name = exception_of(kept, {*census.identities(), *map(id, by_place.values())})
                function = kept.tb_frame.f_code.co_name
                found.append(KeptException(*place, function, error, name, entries, len(steps)))
        return found


def _held_by(frame: FrameType, kinds: Collection[type]) -> set[int]:
    """Return the storages of the tensors in the local variables of a frame, without parameters."""
    others = {id(frame.f_globals), id(frame.f_builtins), id(frame.f_back)}
    local_variables = [one for one in gc.get_referents(frame) if id(one) not in others]
    held = [one for one in local_variables if type(one) in kinds]
    for one in local_variables:
        if isinstance(one, (dict, list, tuple, set)):
            held += reached(one, kinds, MOST_HELD)
    storages = [storage_of(one) for one in held if not (one.is_leaf and one.requires_grad)]
    return {storage._cdata for storage in storages if storage is not None}


def exception_of(traceback: TracebackType, ignored: Iterable[int]) -> tuple[str, Name | None]:
    """Return the class of the exception that a part of a traceback belongs to, and the name of what keeps it.

    Args:
        ignored: ids of objects of the trace that refer to the traceback.
    """
    level: list[Any] = [traceback]
    left_out = {*ignored, id(traceback)}
    for _ in range(MOST_FRAMES):  # from the innermost frame to the outermost
        left_out.add(id(level))
        level = referrers(level, left_out)
        error = next((one for one in level if isinstance(one, BaseException)), None)
        if error is not None:
            return type(error).__name__, name_of(error, running_locals(), {*left_out, id(level)})
        level = [one for one in level if isinstance(one, TracebackType)]
    return "an exception", None
