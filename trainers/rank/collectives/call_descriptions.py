"""Describe the calls of collectives: names, inputs and source line, encoded once for each line and input.

Encoding is half of the time of an entry, and a step of GRPO issues twenty collectives from the same lines.
Called by `recorder.py` for each entry. Does not write the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from grpo_run.runtime.board.collective_log import Description, describe
from grpo_run.watchdog.deadlocks.collectives import dtype_name
from grpo_run.watchdog.evidence.source import is_outside_frameworks

MAX_FRAMES = 60
"""Number of frames that are searched for the caller."""
MAX_TENSORS = 4
"""Sizes of more tensors are not logged, because logging hundreds would take longer than the collective."""
MAX_DESCRIPTIONS = 4096
"""Number of encoded descriptions that are kept; sequence lengths may give a source line many sizes."""


class CallDescriptions:
    """Descriptions of one rank's calls. Threads may share it.

    Args:
        capacity: number of descriptions that are kept.
    """

    def __init__(self, capacity: int = MAX_DESCRIPTIONS) -> None:
        self._capacity = capacity
        # by identity: to hash a code object is to read all of it, which takes longer than the rest of an entry. Both keep
        # the code objects, so that no other one is made at the address of a freed one
        self._frameworks: dict[int, CodeType] = {}
        self._callers: dict[int, CodeType] = {}
        self._descriptions: dict[tuple[object, ...], Description] = {}

    def __len__(self) -> int:
        return len(self._descriptions)

    def describe(
        self, group: str, operation: str, tensors: Sequence[Any], frame: FrameType | None
    ) -> Description:
        """Return the description of a call.

        Args:
            group: name of the process group.
            operation: name of the process group method.
            tensors: the inputs.
            frame: the innermost frame; its first caller outside torch and grpo-run is the one that counts.
        """
        frame = self._caller(frame)
        if len(tensors) > MAX_TENSORS:
            tensors = ()
        shapes = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        key = (
            (group, operation, shapes, id(frame.f_code), frame.f_lasti)
            if frame is not None
            else (group, operation, shapes)
        )
        try:
            description = self._descriptions.get(key)
        except TypeError:  # sizes are symbolic during tracing, and have no hash
            return _describe(group, operation, shapes, frame)
        if description is None:
            if len(self._descriptions) >= self._capacity:
                self._descriptions.clear()
            description = self._descriptions[key] = _describe(group, operation, shapes, frame)
        return description

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame outside torch, its wrappers, Python and grpo-run."""
        frameworks, callers = self._frameworks, self._callers
        for _ in range(MAX_FRAMES):
            if frame is None:
                return None
            code = frame.f_code
            if id(code) not in frameworks:
                if id(code) in callers:
                    return frame
                known = callers if is_outside_frameworks(code.co_filename) else frameworks
                known[id(code)] = code
                if known is callers:
                    return frame
            frame = frame.f_back
        return None


def _describe(
    group: str, operation: str, shapes: Sequence[tuple[Any, Any]], frame: FrameType | None
) -> Description:
    """Encode what collectives of one source line with the same inputs have in common.

    Args:
        shapes: shape and dtype of each input.
        frame: of the caller.
    """
    return describe(
        group=group,
        operation=operation,
        sizes=";".join(",".join(map(str, shape)) for shape, _ in shapes),
        dtypes=";".join(dtype_name(str(dtype)) for _, dtype in shapes),
        file=frame.f_code.co_filename if frame else "",
        line=frame.f_lineno if frame else 0,
        function=frame.f_code.co_name if frame else "",
    )
