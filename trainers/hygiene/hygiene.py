"""Hygiene after the steps of one call: what this rank needs, and what all ranks have agreed to do.

Used by `calls/steps.py`. A rank's need is put into its next vote, and every rank acts on the result after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.trainers.accounting.device import DeviceMemory
from grpo_run.trainers.accounting.phases import Host
from grpo_run.trainers.accounting.step_memory import StepMemory
from grpo_run.trainers.hygiene.cleaning import clean
from grpo_run.trainers.hygiene.policy import NOTHING, HygienePolicy, Need


class StepHygiene:
    """Hygiene of one call on this rank.

    Args:
        every: steps that are looked at together; 0 for no hygiene.
        journal: takes the fields of a `hygiene` event; None on ranks that journal nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        every: int,
        slot: SlotWriter,
        device: DeviceMemory,
        host: Host,
        *,
        journal: Callable[..., object] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = HygienePolicy(every, clock)
        self._slot = slot
        self._device = device
        self._host = host
        self._journal = journal
        self._need: Need = NOTHING

    def observe(self, step: int, memory: StepMemory | None) -> None:
        """Look at the memory after a step; None if it was not measured."""
        if memory is not None:
            self._need = self._policy.observe(step, memory, self._device.free_bytes)

    def take_need(self) -> Need:
        """Return what this rank votes for, once."""
        need, self._need = self._need, NOTHING
        return need

    def clean(self, step: int, agreed: Need) -> None:
        """Do what all ranks have agreed on; nothing if that is nothing."""
        if not any(agreed):
            return
        outcome, memory = clean(agreed, self._slot, self._device, self._host)
        self._policy.cleaned(outcome, memory)
        if self._journal is not None:
            fields: dict[str, Any] = {
                "seconds": outcome.seconds, "garbage": agreed.collect, "caches": agreed.release,
                "collected": outcome.collected, "freed_bytes": outcome.freed_bytes,
                "freed_device_bytes": outcome.freed_device_bytes, "released_bytes": outcome.released_bytes,
            }  # fmt: skip
            self._journal(step=step, **fields)
