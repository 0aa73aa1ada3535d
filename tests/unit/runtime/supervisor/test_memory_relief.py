"""What the supervisor does when memory is short: it frees what nobody needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.event import Event, event_name
from grpo_run.runtime.supervisor.host_watch import CALM_SECONDS, MemoryRelief
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, ProcessMemory

LIMIT = 100 << 30


class World:
    """A relief with recorded effects, and ranks that use a part of a limit."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.announced: list[bool] = []
        self.kept_newest: list[bool] = []
        self.drains: Any = SimpleNamespace(memory_is_short=False, free_memory=self._free)
        reporter: Any = SimpleNamespace(
            write=self._write, notify=lambda text: None, warn_once=lambda *words: None
        )
        self.relief = MemoryRelief(self.drains, reporter)
        self.board: Any = SimpleNamespace(announce_short_memory=self.announced.append)
        self.step, self.now = 0, 0.0

    def _write(self, event: Event) -> None:
        self.events.append(event_name(event))

    def _free(self, *, keep_newest: bool) -> int:
        self.kept_newest.append(keep_newest)
        return 5

    def record(self, fraction: float, *, seconds: float = 1.0) -> None:
        """One sample, after the step that is committed."""
        self.now += seconds
        used = int(fraction * LIMIT)
        rank = ProcessMemory(anonymous_bytes=used, file_bytes=0, shared_bytes=0)
        limit = LimitUse(name="x", limit_bytes=LIMIT, usage_bytes=used, working_set_bytes=used)
        sample = HostSample(at=0.0, limits=(limit,), ranks={0: rank})
        attempt: Any = SimpleNamespace(committed=(1, self.step) if self.step else (0, 0))
        self.relief.record(sample, attempt, self.board, self.now)


@pytest.fixture
def world() -> World:
    """A run in its first attempt."""
    return World()


def test_short_memory_frees_what_nobody_needs(world: World) -> None:
    """Steady use of 93 %: snapshots and caches go; once it is calm, everything is as before."""
    world.step = 1
    for _ in range(20):
        world.step += 1
        world.record(0.93)
    assert world.drains.memory_is_short
    assert world.announced == [True]
    assert world.events.count("memory_short") == 1
    assert "memory_freed" in world.events
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
