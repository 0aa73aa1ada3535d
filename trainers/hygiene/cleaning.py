"""Collects garbage and returns cached device memory, and measures what that costs and frees.

Called by `hygiene.py` between two steps, on every rank on the same step: if each rank did it at a step of its own, all would
wait each time. Never called during generation, nor in a run whose vLLM engine sleeps. Decides nothing.
"""

from __future__ import annotations

import gc
import time

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.trainers.accounting.device import DeviceMemory
from grpo_run.trainers.accounting.phases import Host
from grpo_run.trainers.accounting.step_memory import StepMemory
from grpo_run.trainers.hygiene.policy import Need, Outcome
from grpo_run.watchdog.observation import Phase


def clean(what: Need, slot: SlotWriter, device: DeviceMemory, host: Host) -> tuple[Outcome, StepMemory]:
    """Free what the ranks have agreed on. Return the outcome, and the memory afterwards."""
    began = time.perf_counter()
    slot.enter(Phase.hygiene)
    before = _memory(device, host)
    collected = gc.collect() if what.collect else 0
    if what.release:
        device.release()
    after = _memory(device, host)
    slot.leave(Phase.hygiene)
    outcome = Outcome(
        seconds=time.perf_counter() - began,
        freed_bytes=max(0, before.anonymous - after.anonymous),
        freed_device_bytes=max(0, before.allocated - after.allocated),
        released_bytes=max(0, before.reserved - after.reserved),
        collected=collected,
    )
    slot.hygiene_runs += 1
    slot.hygiene_seconds += outcome.seconds
    totals = slot.memory_area.totals
    totals.released_bytes += outcome.released_bytes
    totals.freed_bytes += outcome.freed_bytes
    slot.memory_area.publish()
    return outcome, after


def _memory(device: DeviceMemory, host: Host) -> StepMemory:
    allocated, reserved = device.sizes()
    own = host.read()
    return StepMemory(
        allocated=allocated, reserved=reserved, peak_allocated=allocated, resident=own.resident,
        anonymous=own.anonymous, capacity=0,
    )  # fmt: skip
