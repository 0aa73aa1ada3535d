"""Measure the memory of each phase when it ends, on the device and on the host, and publish it.

The slot's writer calls `changed` whenever another phase begins, and `runtime/rank/step/events.py` calls
`step_ended` after each step. Figures go to the board. The cost of measuring is bounded: while it has taken
more than its share of the time, whole steps are left out, so that the phases of a step are either all
measured or not at all. Host memory of this process, now and at most, costs a few microseconds; it is not
split by kind, because that takes the kernel a walk over all pages, which the supervisor does outside the
steps. Measures only.
"""

from __future__ import annotations

import os
import resource
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from grpo_run.runtime.board.memory_area import MemoryAreaWriter
from grpo_run.runtime.rank.memory.cleanup_policy import StepMemory
from grpo_run.runtime.rank.memory.device import DeviceReading
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostReading(NamedTuple):
    """Memory of one process on the host, in bytes."""

    resident: int
    anonymous: int
    """Without shared memory, such as snapshots, and without mapped files."""
    most_resident: int
    """The most that was resident at any time."""


class ResidentMemory:
    """Reads the resident memory of the process that has created it."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> HostReading:
        """Return the figures of now."""
        _, resident, shared, _ = os.pread(self._descriptor, 128, 0).split(b" ", 3)
        pages = int(resident)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return HostReading(pages * _PAGE_BYTES, (pages - int(shared)) * _PAGE_BYTES, most)


SHARE_WITH_DEVICE = 0.002
SHARE_ON_HOST = 0.0005
"""What measuring may take of the time since the first step. A step has 5 to 20 readings. With a device each
is estimated to take 50 µs, so steps of 0.5 s and more are all measured; without one it takes 30 µs
(docs/reference/benchmarks.md), and steps of 50 ms cost 0.025 ms on average."""
SELDOM_NS = 200_000_000
"""How often memory is read at the end of steps whose phases are not measured: cleanup needs it."""
ADVANCE_NS = 500_000
"""What may be spent in addition, so that the steps after the first one, in which memory still grows, are
measured as well.
"""


class PhaseAccounting:
    """Memory of one rank by phase. Used by one thread at a time.

    Args:
        area: where the figures are published.
        read_device: returns the figures of the device of now, and begins new peaks; None without an
            initialized device.
        read_host: returns the figures of this process of now.
        warn: takes one line, if reading fails; nothing is measured from then on.
        clock: nanoseconds.
    """

    def __init__(
        self,
        area: MemoryAreaWriter,
        read_device: Callable[[], DeviceReading | None],
        read_host: Callable[[], HostReading],
        *,
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._area = area
        self._read_device, self._read_host = read_device, read_host
        self._warn = warn
        self._clock = clock
        self._first_step: tuple[int, int] | None = None
        """When the first step has ended, and what had been spent until then."""
        self._measuring = True
        self._failed = False
        self._most_resident = read_host().most_resident
        self._anonymous = 0
        self._step_peak = 0
        self._read_at = clock()
        self._counters = (0, 0)

    def changed(self, ended: Phase | None) -> None:
        """Measure the phase that has run until now.

        Args:
            ended: the innermost open phase; None outside all phases.
        """
        if self._measuring:
            self._measure(ended)

    def step_ended(self) -> StepMemory | None:
        """Return the memory at the end of a step, and decide whether the phases of the next one are measured.

        Call it when the next phase has begun. None if the memory was not read. The peak is that since the
        last such reading.
        """
        if self._failed:
            return None
        totals, now = self._area.totals, self._clock()
        if self._first_step is None:
            self._first_step = now, totals.spent_ns
        began, spent = self._first_step
        share = SHARE_WITH_DEVICE if totals.has_device else SHARE_ON_HOST
        affordable = totals.spent_ns - spent <= ADVANCE_NS + share * (now - began)
        if not self._measuring:
            if not affordable and now - self._read_at < SELDOM_NS:
                return None
            self._measure(None)  # what has passed since the last reading belongs to no single phase
        self._measuring = affordable and not self._failed
        if self._failed:
            return None
        peak, self._step_peak = self._step_peak, 0
        return StepMemory(
            allocated=totals.allocated_bytes, reserved=totals.reserved_bytes, peak_allocated=peak,
            anonymous=self._anonymous, capacity=totals.capacity_bytes,
        )  # fmt: skip

    def script_raised(self, running: Phase | None) -> None:
        """Measure once more, also in a step that is not measured, because an exception has ended the script.

        Args:
            running: the innermost phase that the script has not left.
        """
        if not self._failed:
            self._measure(running if self._measuring else None)

    def _measure(self, ended: Phase | None) -> None:
        began = self._clock()
        try:
            device, host = self._read_device(), self._read_host()
        except Exception as error:  # noqa: BLE001 - figures are not worth the script's run
            self._failed, self._measuring = True, False
            self._warn(f"memory is not measured any more: {type(error).__name__}: {error}")
            return
        self._record(ended, device, host)
        self._read_at = self._clock()
        self._area.totals.spent_ns += self._read_at - began

    def _record(self, ended: Phase | None, device: DeviceReading | None, host: HostReading) -> None:
        totals = self._area.totals
        resident, self._anonymous, most_resident = host
        # without a new highest of the process, only the end of the phase is known
        peak_resident = most_resident if most_resident > self._most_resident else resident
        self._most_resident = most_resident
        retries = 0
        if device is not None:
            totals.has_device = True
            totals.capacity_bytes = device.capacity
            self._step_peak = max(self._step_peak, device.peak_allocated)
            # the script may have reset the allocator's counters
            retries, ooms = (
                now - before if now >= before else now
                for now, before in zip((device.retries, device.ooms), self._counters, strict=True)
            )
            self._counters = device.retries, device.ooms
            totals.ooms += ooms
        changed: list[RankMemory | PhaseMemory] = [totals]
        if ended is not None:
            own = self._area.figures(ended)
            own.peak_resident_bytes = max(own.peak_resident_bytes, peak_resident)
            changed.append(own)
        for one in changed:
            one.readings += 1
            one.resident_bytes = resident
            if device is not None:
                one.allocated_bytes = device.allocated
                one.reserved_bytes = device.reserved
                one.inactive_split_bytes = device.inactive_split
                one.retries += retries
                one.peak_allocated_bytes = max(one.peak_allocated_bytes, device.peak_allocated)
                one.peak_reserved_bytes = max(one.peak_reserved_bytes, device.peak_reserved)
        self._area.publish(ended)
