"""Hygiene runs on the same step on every rank, and its cost is recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.trainers.calls import hygiene
from grpo_run.watchdog.observation import Phase, Slot


@pytest.mark.parametrize(
    ("step", "every", "due"),
    [(0, 100, False), (1, 100, False), (100, 100, True), (150, 100, False), (200, 100, True), (7, 1, True), (7, 0, False)],
)  # fmt: skip
def test_the_step_alone_decides_when_hygiene_is_due(step: int, every: int, due: bool) -> None:
    """Never at step 0, and never if the interval is 0."""
    assert hygiene.due(step, every) is due


def test_cleaning_is_counted_and_timed(
    slot: SlotWriter, reading: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its own phase, which is closed afterwards."""
    during: list[Phase | None] = []
    monkeypatch.setattr(gc, "collect", lambda: during.append(reading().phase))
    seconds = hygiene.clean(slot)
    slot.publish()
    assert during == [Phase.hygiene]
    assert reading().phases == ()
    assert reading().hygiene_runs == 1
    assert reading().hygiene_seconds == seconds >= 0


def test_cleaning_collects_garbage(slot: SlotWriter) -> None:
    """A reference cycle is freed."""
    import weakref

    class Node:
        """References itself."""

        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        gone = weakref.ref(Node())
        hygiene.clean(slot)
        assert gone() is None
    finally:
        gc.enable()
