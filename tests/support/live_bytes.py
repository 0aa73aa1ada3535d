"""Count the bytes of live tensors while a training runs, on any device, and optionally limit them.

Used by tests of predicted memory and by `benchmarks/scripts/rloo_memory.py`. A storage counts once, from the
first operator that sees it until it is freed. Buffers inside an operator are not seen, nor is what an
allocator reserves beyond the tensors.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from grpo_run.runtime.upstream.dispatch_modes import TorchDispatchMode

WINDOW_SECONDS = 0.005
"""The highest value in each window of this length is kept for the picture."""
MIB = float(1 << 20)


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts.

    Attributes:
        peaks: highest number of live bytes, by phase.
        series: seconds since the mode was made, live bytes, and phase.

    Args:
        limit_bytes: an operator after which more is alive raises torch's own error; None for no limit.
        clock: returns seconds.
    """

    def __init__(
        self, limit_bytes: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.peaks: dict[str, int] = {}
        self.series: list[tuple[float, int, str]] = []
        self._limit_bytes, self._clock, self._started = limit_bytes, clock, clock()
        self._sizes: dict[int, int] = {}
        self._total, self._phase = 0, "start"

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is alive inside for a phase."""
        before = self._phase
        self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, name: str) -> None:
        """Say which phase begins; a new one takes over what is alive."""
        self._phase = name
        self._note()

    @property
    def peak_bytes(self) -> int:
        """The highest number of live bytes so far."""
        return max(self.peaks.values(), default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count the storages of its arguments and results.

        Raises:
            torch.OutOfMemoryError: more is alive than the limit.
        """
        result = func(*args, **(kwargs or {}))
        before = self._total
        for tensor in _tensors((args, *(kwargs or {}).values(), result)):
            self._count(tensor.untyped_storage())
        added = self._total - before
        if added:
            if self._limit_bytes is not None and self._total > self._limit_bytes:
                free = max(0, self._limit_bytes - before)
                raise torch.OutOfMemoryError(
                    f"The limit on live tensors is reached. Tried to allocate {added / MIB:.2f} MiB. The"
                    f" limit is a total capacity of {self._limit_bytes / MIB:.2f} MiB of which"
                    f" {free / MIB:.2f} MiB is free."
                )
            self._note()
        return result

    def _count(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._sizes or size == 0:
            return
        self._sizes[address] = size
        self._total += size
        weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self._total -= self._sizes.pop(address)
        self._note()

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._total)
        now = self._clock() - self._started
        if self.series:
            last, highest, phase = self.series[-1]
            if phase == self._phase and now - last < WINDOW_SECONDS:
                self.series[-1] = (last, max(highest, self._total), phase)
                return
        self.series.append((now, self._total, self._phase))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
