"""Memory is freed at the end, unless it has the only copy of a snapshot."""

from __future__ import annotations

import shutil

import pytest
from support.builders.runtime.draining_run import World


@pytest.mark.parametrize("entry", [(), (0, 5), (0, 4)])
def test_closing_frees_the_memory_when_every_snapshot_is_done(world: World, entry: tuple[int, ...]) -> None:
    """Superseded snapshots need not be on disk, broken ones cannot be, and there may have been none."""
    if entry == (0, 5):
        world.take(0, 5)
        world.take(1, 4, scheduled=False)
    elif entry:
        world.take(0, 4)
        shutil.rmtree(world.staging.slots[0].files)
    world.scheduler.flush(newest_only=False)
    world.scheduler.close()
    assert not world.staging.path.exists()
    assert all(not process.alive for process in world.processes)


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
