"""Memory is freed at the end, unless it has the only copy of a snapshot."""

from __future__ import annotations

import shutil

import pytest
from support.builders.runtime.draining_run import World


def test_closing_frees_the_memory_when_every_snapshot_is_done(world: World) -> None:
    """Superseded snapshots need not be on disk."""
    world.take(0, 5)
    world.take(1, 4, scheduled=False)
    world.scheduler.flush(restore=False)
    world.scheduler.close()
    assert not world.staging.path.exists()
    assert world.warnings == []
    assert not world.processes[0].alive


@pytest.mark.parametrize("scheduled", [True, False])
def test_closing_keeps_the_memory_of_an_undrained_newest_snapshot(world: World, scheduled: bool) -> None:
    """The run may be resumed from it."""
    world.take(0, 9, scheduled=scheduled)
    assert world.scheduler.close()
    assert [staged.step for staged, _ in world.staging.snapshots()] == [9]


def test_closing_keeps_the_memory_of_an_undrained_scheduled_snapshot(world: World) -> None:
    """A newer one on disk does not replace it."""
    world.take(0, 5)
    world.take(1, 9)
    world.staging.slots[1].mark_drained()
    world.scheduler.close()
    assert world.staging.snapshots()


def test_closing_frees_the_memory_of_a_broken_snapshot(world: World) -> None:
    """It cannot be drained."""
    world.take(0, 9)
    shutil.rmtree(world.staging.slots[0].files)
    world.scheduler.flush(restore=False)
    world.scheduler.close()
    assert not world.staging.path.exists()


def test_closing_without_any_snapshot_frees_the_memory(world: World) -> None:
    """The run ended before its first snapshot."""
    world.scheduler.close()
    assert not world.staging.path.exists()
    assert world.warnings == []
