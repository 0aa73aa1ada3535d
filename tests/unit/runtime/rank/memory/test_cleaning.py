"""Cleaning frees what nothing uses, and its cost and its effect are recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.event import Event, as_record
from grpo_run.runtime.rank.memory.cleanup import StepCleanup
from grpo_run.runtime.rank.memory.cleanup_policy import CleanupNeed
from grpo_run.runtime.rank.memory.device import DeviceMemory
from grpo_run.runtime.rank.memory.phases import ResidentMemory
from grpo_run.watchdog.observation import Phase, Slot


class Node:
    """References itself, and so much memory."""

    def __init__(self, size: int = 0) -> None:
        self.itself = self
        self.block = bytearray(b"x") * size


class Gpu(DeviceMemory):
    """A device that holds what it has until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved = 900

    def sizes(self) -> tuple[int, int]:
        """See `DeviceMemory`."""
        return 100, self.reserved

    def release(self) -> None:
        """See `DeviceMemory`."""
        self.reserved = 100


class Cleaning:
    """Cleans on one rank."""

    def __init__(self, slot: SlotWriter, device: DeviceMemory) -> None:
        self.events: list[dict[str, Any]] = []
        self._cleanup = StepCleanup(10, slot, device, ResidentMemory(), journal=self._record)

    def _record(self, event: Event) -> None:
        self.events.append(as_record(event))

    def clean(self, **agreed: bool) -> None:
        """Clean after step 7."""
        self._cleanup.clean(7, CleanupNeed(**agreed))


def test_a_reference_cycle_is_freed_and_counted(
    board: Board, slot: SlotWriter, reading: Callable[[], Slot]
) -> None:
    """In a phase of its own, which is closed afterwards, with its time and what it has freed."""
    gc.collect()
    gc.disable()
    cleaning = Cleaning(slot, DeviceMemory())
    during: list[Phase | None] = []
    slot.on_enter = lambda phase: during.append(reading().phase)
    try:
        gone = weakref.ref(Node(64 * 2**20))
        cleaning.clean(collect=True)
        assert gone() is None
    finally:
        gc.enable()
    slot.publish()
    (event,) = cleaning.events
    assert during == [Phase.cleanup]
    assert reading().phases == ()
    assert (reading().cleanup_runs, reading().cleanup_seconds) == (1, event["seconds"])
    assert event["collected"] >= 1
    assert event["freed_bytes"] > 60 * 2**20
    published = board.rank_memory(0)
    assert published is not None
    assert (published.freed_bytes, published.released_bytes) == (event["freed_bytes"], 0)


def test_only_what_was_agreed_on_is_done(
    board: Board, slot: SlotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches are released without a collection, and the journal has the cost and the effect; nothing is done
    and journaled if nothing was agreed on.
    """
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    cleaning = Cleaning(slot, Gpu())
    cleaning.clean()
    assert cleaning.events == []
    cleaning.clean(release=True)
    (event,) = cleaning.events
    assert (event["step"], event["garbage"], event["caches"]) == (7, False, True)
    assert (event["released_bytes"], event["collected"]) == (800, 0)
    assert event["seconds"] > 0
    published = board.rank_memory(0)
    assert published is not None
    assert published.released_bytes == 800
