"""A rank measures its phases without those inside them, and says what grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.journal import as_event

from grpo_run.runtime.features.phase_growth import rank
from grpo_run.runtime.features.phase_growth.events import PART as HISTORY
from grpo_run.runtime.features.phase_growth.rank import PART
from grpo_run.runtime.history.history import History
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.watchdog.observation import Phase

SHOWN = rank.SHOWN_STEPS
Events = Callable[[], list[dict[str, Any]]]


class Clock:
    """Seconds that pass when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        """Return the present time."""
        return self.now


class Call:
    """A `train()` call of a trainer whose model has two layers, or a loop."""

    def __init__(self, session: Any, clock: Clock, hooks: ExitStack, *, trainer: bool = True) -> None:
        self.slot, self.clock = session.slot, clock
        self.slot.on_change = lambda ended, begun: [changes() for changes in session.on_phase_change]
        self.slot.target_steps = 10 * SHOWN
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        made = SimpleNamespace(model=self.model, state=SimpleNamespace(log_history=[]))
        self.points = CallPoints(train_call=1, trainer=made if trainer else None, models=[], hooks=hooks)
        PART.call(session, self.points)

    def takes(self, steps: int, seconds: Callable[[int], float]) -> None:
        """Take steps."""
        for step in range(1, steps + 1):
            self.slot.replace(Phase.forward_backward)
            self.clock.now += seconds(step)
            self.ends(step)

    def ends(self, step: int) -> None:
        """End a step."""
        self.slot.replace(Phase.data)
        self.clock.now += 0.1
        for ends in self.points.step_ends:
            ends(step)


@pytest.fixture
def hooks() -> Iterator[ExitStack]:
    """What ends with the call."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def call(session: Any, hooks: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A call whose clock is told."""
    clock = Clock()
    monkeypatch.setattr(rank, "time", clock)
    return Call(session, clock, hooks)


def test_a_phase_is_measured_without_the_phases_inside_it(call: Call, events: Events) -> None:
    """Callbacks by name. The first step is left out."""
    slot, clock = call.slot, call.clock
    for step in range(1, SHOWN + 2):
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
        call.ends(step)
    (costs,) = events()
    assert (costs["event"], costs["step"]) == ("phase_costs", SHOWN + 1)
    assert costs["seconds"] == {"data": 5.1, "forward_backward": 9.0, "generate": 2.0, "Mine.on_log": 4.0}


def test_growth_is_journaled_printed_and_in_the_history(session: Any, call: Call, events: Events) -> None:
    """Once."""
    call.takes(30 * SHOWN, lambda step: 1 + 0.002 * step)
    (found,) = [one for one in events() if one["event"] == "growth_found"]
    assert found["phase"] == "forward_backward"
    assert session.notified == [found["sentence"]]
    assert found["sentence"].startswith("steps get slower: phase forward_backward takes ")
    history = History(parts=(HISTORY(),))
    for record in events():
        history.apply(as_event(record, history.decoder))
    shown = history.part(HISTORY)
    assert shown.as_json() == {"growth": {"forward_backward": found["factor"]}}
    assert shown.pace() == [found["sentence"]]
    assert history.unreadable == 0


def test_more_work_is_no_growth(session: Any, call: Call) -> None:
    """Forward passes are counted with their tokens, and attention costs as many as come before."""
    (record_pass,) = call.points.forward_passes
    for step in range(1, 30 * SHOWN):
        length = 1 + step // SHOWN
        record_pass({"input_ids": torch.zeros(2, length)})
        record_pass({})
        call.slot.replace(Phase.forward_backward)
        call.clock.now += length**2
        call.ends(step)
    assert session.notified == []


def test_steps_that_take_as_long_are_not_told(session: Any, call: Call) -> None:
    """The first step is left out, and a single long one is no growth."""
    call.takes(30 * SHOWN, lambda step: 50.0 if step in (1, 777) else 1.0)
    assert session.notified == []


def test_nothing_is_left_of_a_call(session: Any, call: Call, hooks: ExitStack) -> None:
    """Changes of phases after it are not its own."""
    hooks.close()
    assert session.on_phase_change == []


@pytest.mark.parametrize("who", ["another rank", "a loop"])
def test_only_trainers_are_measured_on_rank_0(session: Any, hooks: ExitStack, who: str) -> None:
    """What the others do is not shown."""
    session.is_main = who == "a loop"
    points = Call(session, Clock(), hooks, trainer=who != "a loop").points
    assert (points.step_ends, points.forward_passes, session.on_phase_change) == ([], [], [])
