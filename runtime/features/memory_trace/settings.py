"""The option of the memory trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo_run.runtime.launch.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class MemoryTraceSettings:
    """Whether ranks trace what keeps their memory alive."""

    NAME: ClassVar[str] = "memory_trace"
    enabled: bool = option(
        False, "--memory-trace", group=OptionGroup.training,
        help="name the list, dict, set or deque that keeps tensors of ever more steps, and where it belongs;"
        " steps take up to twice as long",
    )  # fmt: skip


SETTINGS = MemoryTraceSettings
