"""Cleans garbage and allocator caches on the same step on every rank, and says what it cost.

One rank collecting while the others wait costs all of them; together it costs once. Called by the guard's
callback after the optimizer step, never inside generation. Off when `every` is 0.
"""

from __future__ import annotations

import gc
import sys
import time

from grpo_run.runtime.board.board import SlotWriter
from grpo_run.watchdog.observation import Phase


def due(step: int, every: int) -> bool:
    """Whether `step` is one to clean on: the same answer on every rank."""
    return every > 0 and step > 0 and step % every == 0


def clean(slot: SlotWriter) -> float:
    """Collect garbage and give cached accelerator memory back; returns and records the seconds it took."""
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
