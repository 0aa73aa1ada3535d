"""What the supervisor does when memory is short: the mildest measures first, a restart only for progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.event import Event, event_name
from grpo_run.runtime.history.history import History
from grpo_run.runtime.supervisor.host_watch import CALM_SECONDS, LEAST_STEPS, MemoryRelief
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, ProcessMemory

LIMIT = 100 << 30


class World:
    """A relief with recorded effects, and ranks that use a part of a limit."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.history = History()
        self.stops = self.freed = 0
        self.announced: list[bool] = []
        self.kept_newest: list[bool] = []
        self.drains: Any = SimpleNamespace(memory_is_short=False, free_memory=self._free)
        reporter: Any = SimpleNamespace(
            write=self._write, notify=lambda text: None, warn_once=lambda *words: None
        )
        self.relief = MemoryRelief(self.drains, reporter, self.history)
        self.board: Any = SimpleNamespace(
            request_stop=self._stop, announce_short_memory=self.announced.append
        )
        self.step, self.now, self.may_restart = 0, 0.0, True

    def _write(self, event: Event) -> None:
        self.events.append(event_name(event))
        self.history.apply(event)

    def _free(self, *, keep_newest: bool) -> int:
        self.kept_newest.append(keep_newest)
        return 5

    def _stop(self) -> None:
        self.stops += 1

    def record(self, fraction: float, *, seconds: float = 1.0) -> None:
        """One sample, after the step that is committed."""
        self.now += seconds
        used = int(fraction * LIMIT)
        rank = ProcessMemory(anonymous_bytes=used, file_bytes=0, shared_bytes=0)
        limit = LimitUse(name="x", limit_bytes=LIMIT, usage_bytes=used, working_set_bytes=used)
        sample = HostSample(at=0.0, limits=(limit,), ranks={0: rank})
        attempt: Any = SimpleNamespace(committed=(1, self.step) if self.step else (0, 0))
        self.relief.record(sample, attempt, self.board, self.now, may_restart=lambda: self.may_restart)

    def leak(self, *, seconds: float = 30.0) -> None:
        """An attempt whose ranks grow from 50 % to 95 %."""
        self.relief.begin_attempt()
        for number in range(46):
            self.step += 1
            self.record(0.50 + 0.01 * number, seconds=seconds)


@pytest.fixture
def world() -> World:
    """A run in its first attempt."""
    return World()


def test_short_memory_frees_what_nobody_needs_and_restarts_nobody(world: World) -> None:
    """Steady use of 93 %: snapshots and caches go; once it is calm, everything is as before."""
    world.step = 1
    for _ in range(20):
        world.step += 1
        world.record(0.93)
    assert world.drains.memory_is_short
    assert world.announced == [True]
    assert world.events.count("memory_short") == 1
    assert "memory_freed" in world.events
    assert world.stops == 0
    world.record(0.5, seconds=CALM_SECONDS - 1)
    assert world.drains.memory_is_short
    world.record(0.5, seconds=2)
    assert not world.drains.memory_is_short
    assert world.announced == [True, False]


def test_ranks_that_load_keep_the_newest_snapshot(world: World) -> None:
    """They may be about to read it; afterwards it may go, too."""
    world.record(0.95)
    world.step = 1
    world.record(0.95)
    assert world.kept_newest == [True, False]


def test_a_leak_stops_the_ranks_once_in_an_attempt(world: World) -> None:
    """Early, when memory is short, and not again while they save."""
    world.leak()
    assert world.stops == 1
    assert world.relief.restarts
    assert world.history.memory_restarts.count == 1
    world.relief.begin_attempt()
    assert not world.relief.restarts


def test_a_further_restart_needs_progress(world: World) -> None:
    """The next attempt resumes at the step of the restart, and leaks as fast."""
    world.leak()
    assert world.history.memory_restarts.last is not None
    world.step = world.history.memory_restarts.last[1] - 46 + LEAST_STEPS - 1
    world.leak()
    assert world.stops == 1
    world.leak()
    assert world.stops == 2


def test_the_third_restart_waits_until_the_kill_is_near(world: World) -> None:
    """Two early restarts have not helped: a leak of an hour is left to grow, one of a minute is not."""
    world.leak()
    world.leak()
    world.leak()
    assert world.stops == 2
    world.leak(seconds=0.5)
    assert world.stops == 3


def test_ranks_that_cannot_save_are_not_stopped(world: World) -> None:
    """A script that trains by itself, several nodes, or a stop that is requested already."""
    world.may_restart = False
    world.leak()
    assert world.stops == 0
    assert "memory_short" in world.events
