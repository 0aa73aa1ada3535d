"""Collects garbage and releases cached accelerator memory on the same step on every rank.

If each rank collected at a different step, all ranks would wait each time. Called by the callback after the
optimizer step, never during generation. Disabled if the interval is 0.
"""

from __future__ import annotations

import gc
import sys
import time

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.watchdog.observation import Phase


def due(step: int, every: int) -> bool:
    """Return whether to clean after `step`, which is equal on every rank.

    Args:
        every: interval in steps; 0 for never.
    """
    return every > 0 and step > 0 and step % every == 0


def clean(slot: SlotWriter) -> float:
    """Collect garbage and release cached accelerator memory. Return the time taken, in seconds."""
    began = time.perf_counter()
    slot.enter(Phase.hygiene)
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    slot.leave(Phase.hygiene)
    seconds = time.perf_counter() - began
    slot.hygiene_runs += 1
    slot.hygiene_seconds += seconds
    return seconds
