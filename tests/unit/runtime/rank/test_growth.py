"""A rank measures its phases without those inside them, and says what grows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.journal import as_events

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.history.history import History
from grpo_run.runtime.rank import growth
from grpo_run.runtime.rank.growth import GrowthMeter, StepCosts
from grpo_run.watchdog.observation import Phase


class Clock:
    """Seconds that pass when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        """Return the present time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the module."""
    made = Clock()
    monkeypatch.setattr(growth, "time", made)
    return made


@pytest.fixture
def costs(clock: Clock, slot: SlotWriter) -> StepCosts:
    """What the slot's writer is measured by."""
    made = StepCosts(slot)
    slot.on_change = lambda ended, begun: made.changed()
    return made


@pytest.fixture
def model() -> Any:
    """A model of two layers."""
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@pytest.fixture
def meter(session: Any, costs: StepCosts, model: Any, monkeypatch: pytest.MonkeyPatch) -> GrowthMeter:
    """A meter of blocks of two steps."""
    monkeypatch.setattr(growth, "BLOCK_STEPS", 2)
    session.slot.target_steps = 1000
    return meter_of(session, costs, model)


def meter_of(session: Any, costs: StepCosts, model: Any) -> GrowthMeter:
    """Return the meter of a trainer with a model."""
    trainer = SimpleNamespace(model=model, state=SimpleNamespace(log_history=[]))
    return GrowthMeter(trainer, session.slot, costs, journal=session.journal.write, warn=session.warn)


def test_a_phase_is_measured_without_the_phases_inside_it(
    clock: Clock, slot: SlotWriter, costs: StepCosts
) -> None:
    """Callbacks by name; time without a phase is nobody's."""
    clock.now += 5
    slot.replace(Phase.forward_backward)
    clock.now += 1
    slot.enter(Phase.generate)
    clock.now += 2
    slot.enter_callback("Mine.on_log")
    clock.now += 4
    slot.leave(Phase.callback)
    slot.leave(Phase.generate)
    clock.now += 8
    slot.replace(Phase.optimizer)
    assert costs.take() == ({"forward_backward": 9.0, "generate": 2.0, "Mine.on_log": 4.0}, {})
    assert costs.take() == ({}, {})


def test_forward_passes_are_counted_with_their_tokens(costs: StepCosts) -> None:
    """Attention costs as many tokens as come before."""
    costs.record_pass(torch.zeros(2, 3))
    costs.record_pass(None)
    assert (costs.passes, costs.tokens, costs.context) == (2, 6, 18)


def take_steps(
    meter: GrowthMeter, clock: Clock, slot: SlotWriter, count: int, seconds: Callable[[int], float]
) -> None:
    """Take steps whose backward pass takes a given time."""
    for step in range(1, count + 1):
        slot.replace(Phase.forward_backward)
        clock.now += seconds(step)
        slot.replace(Phase.data)
        clock.now += 0.1
        meter.step_ended(step)


def test_growth_is_journaled_printed_and_in_the_history(
    session: Any,
    meter: GrowthMeter,
    clock: Clock,
    slot: SlotWriter,
    model: Any,
    events: Callable[[], list[Any]],
) -> None:
    """Once, with the module that has most hooks."""

    def seconds(step: int) -> float:
        model[1].register_forward_hook(lambda *arguments: None)
        return 1 + 0.1 * step

    # the first tenth are 20 blocks of 2 steps at most
    take_steps(meter, clock, slot, 200, seconds)
    (found,) = [event for event in events() if event["event"] == "growth_found"]
    assert found["phase"] == "forward_backward"
    assert found["grew"][0].startswith("hooks of the model, from ")
    assert found["grew"][0].endswith("(most in 1)")
    assert session.notified == [found["sentence"]]
    history = History.of(as_events(events()))
    assert history.growth == {"forward_backward": (found["factor"], found["sentence"])}
    assert history.unreadable == 0


def test_steps_that_take_as_long_are_not_told(
    session: Any, meter: GrowthMeter, clock: Clock, slot: SlotWriter
) -> None:
    """The first step is left out, and a single long one is no growth."""
    take_steps(meter, clock, slot, 400, lambda step: 50.0 if step in (1, 77) else 1.0)
    assert session.notified == []


def test_the_collector_is_measured_while_the_call_runs(meter: GrowthMeter) -> None:
    """And not after it."""
    before = len(gc.callbacks)
    with meter.measuring():
        assert len(gc.callbacks) == before + 1
        gc.collect()
    assert len(gc.callbacks) == before


def test_the_watch_costs_little(session: Any, slot: SlotWriter, model: Any) -> None:
    """At most 0.05 ms of a step on average, its blocks included."""
    costs = StepCosts(slot)
    slot.target_steps = 100_000
    meter = meter_of(session, costs, model)
    names = [
        "data",
        "generate",
        "score",
        "reward",
        "forward_backward",
        "optimizer",
        "A.on_log",
        "B.on_step_end",
    ]

    def measured(first: int, steps: int) -> float:
        began = time.process_time()
        for step in range(first, first + steps):
            for name in names:
                costs.seconds[name] = 0.01
            for _ in range(16):
                costs.changed()
            meter.step_ended(step)
        return (time.process_time() - began) / steps

    measured(1, 8000)  # the windows are full
    assert min(measured(8001 + 500 * number, 500) for number in range(5)) < 50e-6
