"""Memory cleanup after the steps of one call, on every rank after the same step.

Used by `runtime/rank/step/events.py`. A rank's need (`cleanup_policy.py`) goes into its next vote, and all
ranks act on the result together: if each rank did it at a step of its own, all would wait each time.
Cleaning collects garbage, returns cached device memory, and measures what that costs and frees. It never
happens during generation, nor in a run whose vLLM engine sleeps.

`HostCaches` is not collective: when the supervisor announces on the board that host memory runs short, each
rank frees its caches after its next step, because another rank may see the announcement a step later.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import MemoryCleaned
from grpo_run.runtime.rank.memory.cleanup_policy import (
    NOTHING,
    CleanupNeed,
    CleanupOutcome,
    CleanupPolicy,
    StepMemory,
)
from grpo_run.runtime.rank.memory.device import DeviceMemory
from grpo_run.runtime.rank.memory.phases import ResidentMemory
from grpo_run.watchdog.observation import Phase


class StepCleanup:
    """Cleanup of one call on this rank.

    Args:
        every: steps that are looked at together; 0 for no cleanup.
        journal: takes the event of a cleanup; None on ranks that journal nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        every: int,
        slot: SlotWriter,
        device: DeviceMemory,
        host: ResidentMemory,
        *,
        journal: Callable[[Event], object] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = CleanupPolicy(every, clock)
        self._slot = slot
        self._device = device
        self._host = host
        self._journal = journal
        self._need: CleanupNeed = NOTHING

    def observe(self, step: int, memory: StepMemory | None) -> None:
        """Look at the memory after a step; None if it was not measured."""
        if memory is not None:
            self._need = self._policy.observe(step, memory, self._device.free_bytes)

    def take_need(self) -> CleanupNeed:
        """Return what this rank votes for, once."""
        need, self._need = self._need, NOTHING
        return need

    def clean(self, step: int, agreed: CleanupNeed) -> None:
        """Do what all ranks have agreed on; nothing if that is nothing."""
        if not any(agreed):
            return
        slot, began = self._slot, time.perf_counter()
        slot.enter(Phase.cleanup)
        before = self._memory()
        collected = gc.collect() if agreed.collect else 0
        if agreed.release:
            self._device.release()
        after = self._memory()
        slot.leave(Phase.cleanup)
        outcome = CleanupOutcome(
            seconds=time.perf_counter() - began,
            freed_bytes=max(0, before.anonymous - after.anonymous),
            freed_device_bytes=max(0, before.allocated - after.allocated),
            released_bytes=max(0, before.reserved - after.reserved),
            collected=collected,
        )
        slot.cleanup_runs += 1
        slot.cleanup_seconds += outcome.seconds
        totals = slot.memory_area.totals
        totals.released_bytes += outcome.released_bytes
        totals.freed_bytes += outcome.freed_bytes
        slot.memory_area.publish()
        self._policy.cleaned(outcome, after)
        if self._journal is not None:
            event = MemoryCleaned(
                rank=0, step=step, garbage=agreed.collect, caches=agreed.release, **vars(outcome)
            )
            self._journal(event)

    def _memory(self) -> StepMemory:
        allocated, reserved = self._device.sizes()
        return StepMemory(
            allocated=allocated,
            reserved=reserved,
            peak_allocated=allocated,
            anonymous=self._host.read().anonymous,
            capacity=0,
        )


class HostCaches:
    """What one rank has freed.

    Args:
        board: carries the announcement.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._freed = False

    def after_step(self) -> None:
        """Free caches if memory has become short since they were freed last."""
        short = self._board.memory_is_short
        if short and not self._freed:
            free_caches()
        self._freed = short


def free_caches() -> None:
    """Collect garbage, and give memory that the C library keeps back to the kernel (malloc_trim(3), glibc
    only).
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
