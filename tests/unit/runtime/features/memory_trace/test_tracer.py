"""Looking at what is alive keeps nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from grpo_run.runtime.features.memory_trace import _tracer


def test_the_trace_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with automatic collection off, and when it has looked for the holder."""
    monkeypatch.setattr(_tracer, "SHARE", 1e9)
    found: list[object] = []
    trace = _tracer.MemoryTrace(found.append, pytest.fail)
    gc.collect()
    gc.disable()
    try:
        kept = []
        for step in range(25):
            kept.append(torch.zeros(64))
            trace.step_ended(step)
        freed = [weakref.ref(one) for one in kept]
        del kept
        assert [one() for one in freed] == [None] * 25
        assert len(found) == 1
    finally:
        gc.enable()


def test_steps_are_left_out_if_looking_takes_longer_than_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script takes twice as long at most."""
    now, looked = [0.0], []
    monkeypatch.setattr(_tracer.time, "perf_counter", lambda: now[0])

    def look(self: object, step: int) -> None:
        looked.append(step)
        now[0] += 3

    monkeypatch.setattr(_tracer.MemoryTrace, "_look", look)
    trace = _tracer.MemoryTrace(pytest.fail, pytest.fail)
    for step in range(8):
        now[0] += 1
        trace.step_ended(step)
    assert looked == [0, 3, 6]
