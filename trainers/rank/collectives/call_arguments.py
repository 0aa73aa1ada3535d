"""Read the arguments of a collective: its tensors, and whether it has a timeout. Called by `recorder.py`."""

from __future__ import annotations

from datetime import timedelta
from types import FrameType
from typing import Any

from grpo_run.trainers.upstream import torch_groups

_NO_TIME = timedelta(0)


def is_torchs(frame: FrameType) -> bool:
    """Whether a frame belongs to torch's functions for scripts."""
    return frame.f_code.co_filename.endswith(torch_groups.CALLS_FILE)


def is_limit(option: Any) -> bool:
    """Whether an argument of a collective is a time limit, or options with one."""
    limit = option if isinstance(option, timedelta) else getattr(option, "timeout", None)
    return isinstance(limit, timedelta) and limit >= _NO_TIME


def tensors_of(value: Any) -> list[Any]:
    if type(value) is list and len(value) == 1 and hasattr(value[0], "shape"):
        return value  # the usual case
    if hasattr(value, "shape"):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_of(one)]
    return []
