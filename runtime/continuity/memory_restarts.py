"""Restarts made before host memory ran out. Replayed as part of `runtime.record.history`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class MemoryRestarts:
    """How many there were, and at which (train call, step) the last one was asked for; None without any."""

    count: int = 0
    last: tuple[int, int] | None = None
    short: int = 0
    """How often memory has become short."""

    def apply_restart(self, record: Mapping[str, Any]) -> None:
        """A restart was asked for."""
        self.count += 1
        self.last = int(record["train_call"]), int(record["step"])

    def apply_short(self) -> None:
        """Memory has become short."""
        self.short += 1
