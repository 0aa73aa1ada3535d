"""A stand-in for torch's CUDA allocator: counts what is allocated, and its peaks since the last reset."""

from __future__ import annotations

from typing import Any

NAMES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")


class Allocator:
    """The functions of `torch._C` that torch's memory statistics are made of, for any number of devices."""

    def __init__(self) -> None:
        self._pools: dict[int, dict[str, dict[str, dict[str, int]]]] = {}
        self.counters = {"num_alloc_retries": 0, "num_ooms": 0}
        self.resets = 0

    def set(self, size: int, *, device: int = 0, name: str = "allocated_bytes") -> None:
        """Let a statistic have a value from now on."""
        pool = self._of(device)[name]["all"]
        pool["current"] = size
        pool["peak"] = max(pool["peak"], size)

    def rise(self, size: int, *, device: int = 0, name: str = "allocated_bytes") -> None:
        """Let a statistic have a value for a moment."""
        before = self._of(device)[name]["all"]["current"]
        self.set(size, device=device, name=name)
        self.set(before, device=device, name=name)

    def statistics(self, device: int) -> dict[str, Any]:
        """Return new nested statistics."""
        return {
            **{name: {pool: dict(values) for pool, values in pools.items()} for name,
            pools in self._of(device).items()},
            **self.counters,
        }  # fmt: skip

    def reset(self, device: int) -> None:
        """Let all peaks be the present values."""
        self.resets += 1
        for pools in self._of(device).values():
            for values in pools.values():
                values["peak"] = values["current"]

    def _of(self, device: int) -> dict[str, dict[str, dict[str, int]]]:
        return self._pools.setdefault(
            device,
            {
                name: {pool: {"current": 0, "peak": 0} for pool in ("all", "small_pool", "large_pool")}
                for name in NAMES
            },
        )
