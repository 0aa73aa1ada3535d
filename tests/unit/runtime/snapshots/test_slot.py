"""One staging slot: its snapshot and its lock."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.slots import held, snapshot

from grpo_run.runtime import files
from grpo_run.runtime.snapshots.area import StagingArea


def test_a_completed_snapshot_is_read_back(staging: StagingArea) -> None:
    """Every field, also by a process that opens the area later. One that is only prepared is not complete."""
    staged = snapshot(OUT, 7, limit=2, best="checkpoint-3", scheduled=False)
    slot = staging.slots[1]
    slot.begin_snapshot()
    slot.prepare_snapshot(staged)
    assert slot.read_snapshot() is None
    slot.begin_snapshot()
    with pytest.raises(FileNotFoundError):
        slot.complete_snapshot()  # the next one discards what was prepared
    slot.prepare_snapshot(staged)
    slot.complete_snapshot()
    assert slot.read_snapshot() == staged
    assert StagingArea(staging.path).snapshots() == [(staged, slot)]


OUT = Path("/out")


def test_a_forked_child_does_not_keep_the_lock(staging: StagingArea) -> None:
    """Data loaders and reward functions may fork while the lock is held."""
    slot = staging.slots[0]
    wait, go = os.pipe()
    with slot.locked() as acquired:
        assert acquired
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(wait, 1)
            os._exit(0)
    busy = slot.busy
    os.close(go)
    os.waitpid(child, 0)
    os.close(wait)
    assert not busy


def test_locking_waits_until_the_deadline(staging: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is acquired as soon as it is free."""
    slot, now = staging.slots[0], [0.0]
    stack = ExitStack()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 2.0:
            stack.close()

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    stack.enter_context(held(slot))
    with slot.locked(wait_seconds=1.0) as acquired:
        assert not acquired
    assert 1.0 <= now[0] < 1.1
    with slot.locked(wait_seconds=10.0) as acquired:
        assert acquired
    assert 2.0 < now[0] < 2.1
