"""Whether the exception that ended a script has also ended its loop.

Python destroys the iterator of a `for` while the exception is on its way, as it does after `break`; the iterator cannot
see which. So `runtime/rank/loops/run.py` keeps where the script was, and the bootstrap compares that with the exception's traceback.
Knows nothing of loops.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FrameType, TracebackType

from grpo_run.watchdog.observation import Phase

GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
RAISES_AGAIN = ("RERAISE", "RAISE_VARARGS")


class LeftPlace:
    """Where the script was when it left a loop before its end, and in which phase of a step.

    Args:
        frame: that executes the loop. A generator's is skipped: it is destroyed with the frame that iterates over it.
        phase: of the step in progress.
    """

    def __init__(self, frame: FrameType | None, phase: Phase) -> None:
        while frame is not None and frame.f_code.co_flags & GENERATORS:
            frame = frame.f_back
        # not the frame itself, which would keep the script's variables alive
        self._frame = id(frame)
        self._code = frame.f_code if frame is not None else None
        self._instruction = frame.f_lasti if frame is not None else -1
        self.phase = phase

    def is_in(self, trace: TracebackType | None) -> bool:
        """Return whether an exception was on its way through this place."""
        while trace is not None:
            frame = trace.tb_frame
            if id(frame) == self._frame and frame.f_code is self._code:
                return trace.tb_lasti == self._instruction or self._passed_a_handler(
                    frame.f_code, trace.tb_lasti
                )
            trace = trace.tb_next
        return False

    def _passed_a_handler(self, code: CodeType, raised_at: int) -> bool:
        """Return whether the exception was raised in the loop's body, and again by a `finally` or `except` there."""
        instructions = list(dis.get_instructions(code))
        again = any(one.offset == self._instruction and one.opname in RAISES_AGAIN for one in instructions)
        return again and any(
            one.opname == "FOR_ITER" and one.offset < raised_at < one.argval for one in instructions
        )
