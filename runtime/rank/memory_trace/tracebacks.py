"""What kept exceptions hold: the local variables of the functions that they were raised through.

Used by `tracer.py`. A traceback refers to the frames of functions that have ended, and those to their local variables.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace.names import Name, name_of
from grpo_run.runtime.rank.memory_trace.referrers import referrers, running_frames, running_locals

MOST_HELD = 200
"""Objects in the local variables of one frame that are looked at."""
DEPTH = 3
"""Levels of containers below a local variable."""


class KeptFrame(NamedTuple):
    """A frame of a kept exception that holds tensors.

    Args:
        file: of the frame.
        line: at which the exception was raised or passed on.
        function: of the frame.
        tensors: in its local variables.
        traceback: the part of the traceback for this frame.
    """

    file: str
    line: int
    function: str
    tensors: list[Any]
    traceback: TracebackType


def kept_frames(tracebacks: Iterable[TracebackType], kinds: Collection[type]) -> list[KeptFrame]:
    """Return the frames that have ended and hold tensors.

    Args:
        kinds: classes of tensors.
    """
    running = running_frames()
    found: list[KeptFrame] = []
    for traceback in tracebacks:
        ended = traceback.tb_frame
        if id(ended) in running:
            continue
        tensors = _tensors_in(ended, kinds)
        if tensors:
            code = ended.f_code
            found.append(KeptFrame(code.co_filename, traceback.tb_lineno, code.co_name, tensors, traceback))
    return found


def _tensors_in(frame: FrameType, kinds: Collection[type]) -> list[Any]:
    seen = {id(frame), id(frame.f_globals), id(frame.f_builtins)}
    level: list[Any] = [frame]
    found: list[Any] = []
    for _ in range(DEPTH + 1):
        following: list[Any] = []
        for holder in level:
            for part in gc.get_referents(holder):
                if id(part) in seen or len(seen) > MOST_HELD:
                    continue
                seen.add(id(part))
                if type(part) in kinds:
                    found.append(part)
                elif isinstance(part, (dict, list, tuple, set, Mapping)):
                    following.append(part)
        level = following
    return found


def exception_of(traceback: TracebackType, ignored: Iterable[int]) -> tuple[str, Name | None]:
    """Return the class of the exception that a part of a traceback belongs to, and the name of what keeps it."""
    level: list[Any] = [traceback]
    left_out = {*ignored, id(traceback)}
    for _ in range(64):  # from the innermost frame to the outermost
        left_out.add(id(level))
        level = referrers(level, left_out)
        error = next((one for one in level if isinstance(one, BaseException)), None)
        if error is not None:
            ours = {*left_out, id(level)}
            return type(error).__name__, name_of(error, running_locals(), ours)
        level = [one for one in level if isinstance(one, TracebackType)]
        if not level:
            break
    return "an exception", None
