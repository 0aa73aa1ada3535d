"""The figures in a message about exhausted memory: requested, free and used bytes. Pure.

Called by `shortage.py`. Sources of the texts: see `error_patterns.py`. A figure that a message does not have is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from grpo_run.watchdog.text import size_text

_UNITS = {"bytes": 1, "byte": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")}
_UNITS |= {f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")}
_SIZE = r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[KMGT]i?B|bytes?|B)\b"
_PATTERNS = {
    "tried_bytes": (rf"\btried to allocate {_SIZE}", rf"\bUnable to allocate {_SIZE}", rf"\bFailed to CUDA [\w ]+ {_SIZE}",
                    r"\bOut of memory allocating (?P<number>[\d,]+) (?P<unit>bytes)"),
    "free_bytes": (rf"\bof which {_SIZE} is free", rf"; {_SIZE} free\b"),
    "capacity_bytes": (rf"\btotal capaci?ty of {_SIZE}", rf"; {_SIZE} total capacity\b", rf"\bmax allowed: {_SIZE}"),
    "in_use_bytes": (rf"\bthis process has {_SIZE} memory in use",),
    "allocated_bytes": (rf"\bOf the allocated memory {_SIZE} is allocated by", rf"; {_SIZE} already allocated\b",
                        rf"\bMPS allocated: {_SIZE}"),
    "unallocated_bytes": (rf"\band {_SIZE} is reserved by \w+ but unallocated",),
    "_reserved_bytes": (rf"; {_SIZE} reserved in total by",),
}  # fmt: skip
_COMPILED = {
    name: tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)
    for name, patterns in _PATTERNS.items()
}
_VLLM_FREE = re.compile(
    r"Free memory on device[^(\n]*\((?P<free>\d+(?:\.\d+)?)/(?P<total>\d+(?:\.\d+)?) GiB\)", re.IGNORECASE
)
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Sizes of a message, in bytes; None for one that it does not have.

    Args:
        tried_bytes: the allocation that failed.
        free_bytes, capacity_bytes: of the device.
        in_use_bytes: by the process, torch and others.
        allocated_bytes: by tensors, in torch's allocator.
        unallocated_bytes: reserved by torch's allocator, and not allocated.
    """

    tried_bytes: int | None = None
    free_bytes: int | None = None
    capacity_bytes: int | None = None
    in_use_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None

    def as_json(self) -> dict[str, int | None]:
        """Return plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Figures:
        """Read what `as_json` has written; anything but a number is None."""
        known = {field.name: value.get(field.name) for field in fields(cls)}
        return cls(**{name: one if isinstance(one, int) else None for name, one in known.items()})

    @property
    def request(self) -> str:
        """`tried to allocate 2.0 GiB with 512 MiB of 79.2 GiB free`; empty if nothing of it is known."""
        parts = []
        if self.tried_bytes is not None:
            parts.append(f"tried to allocate {size_text(self.tried_bytes)}")
        if self.free_bytes is not None:
            total = f" of {size_text(self.capacity_bytes)}" if self.capacity_bytes is not None else ""
            parts.append(f"{'with ' if parts else ''}{size_text(self.free_bytes)}{total} free")
        return " ".join(parts)

    @property
    def usage(self) -> str:
        """`71.3 GiB allocated, 5.3 GiB reserved and not allocated, …`; empty if nothing of it is known."""
        known = {
            "allocated by tensors": self.allocated_bytes,
            "reserved and not allocated": self.unallocated_bytes,
            "in use by the process": self.in_use_bytes,
        }
        return ", ".join(f"{size_text(count)} {what}" for what, count in known.items() if count is not None)


def read_figures(message: str) -> Figures:
    """Return the figures of a message."""
    found = {name: _first(patterns, message) for name, patterns in _COMPILED.items()}
    reserved, allocated = found.pop("_reserved_bytes"), found["allocated_bytes"]
    if reserved is not None and allocated is not None:
        found["unallocated_bytes"] = max(0, reserved - allocated)
    engine = _VLLM_FREE.search(message)
    if engine is not None:
        found["free_bytes"] = round(float(engine["free"]) * _GIB)
        found["capacity_bytes"] = round(float(engine["total"]) * _GIB)
    return Figures(**found)


def _first(patterns: tuple[re.Pattern[str], ...], message: str) -> int | None:
    for pattern in patterns:
        found = pattern.search(message)
        if found is not None:
            return round(float(found["number"].replace(",", "")) * _UNITS[found["unit"].lower()])
    return None
