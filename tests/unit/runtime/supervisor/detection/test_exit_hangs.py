"""How often the processes that remain after the last line of every script are observed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from support.builders.watchdog.slots import make_slot

from grpo_run.runtime.supervisor.detection.exit_hangs import CONNECTIONS_SECONDS, ExitHangDetector
from grpo_run.watchdog.observation import RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts, ProcessUsage


@pytest.mark.parametrize(
    ("cost", "seconds", "most", "most_connections"),
    [
        (0.0, 70, 1000, 70 / CONNECTIONS_SECONDS + 3),
        (0.1, 200, 200 / (0.1 / 0.005) + 1, 11),  # half a percent of a core, on a machine with many processes
    ],
)
def test_an_observation_is_made_as_often_as_it_is_cheap(
    cost: float, seconds: int, most: float, most_connections: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections cost tens of milliseconds; a verdict needs them to be current."""
    spent, looks = 0.0, []

    def observe(pids: Mapping[int, int], *, connections: bool) -> ExitFacts:
        nonlocal spent
        spent += cost
        looks.append(connections)
        usage = ProcessUsage(cpu_seconds=10.0, io_bytes=1000)
        return ExitFacts(states={0: "S"}, own={(900, 1): usage}, waits_for=())

    detector = ExitHangDetector(DeadlineSettings(), observe)
    monkeypatch.setattr(time, "thread_time", lambda: spent)
    slots: dict[int, Slot] = {0: make_slot(0, state=RankState.done)}
    for number in range(seconds * 10):
        if detector.scan(slots, {0: 900}, 1000.0 + number / 10) is not None:
            break
    assert len(looks) <= most
    assert sum(looks) <= most_connections
    assert looks[-1] or cost
