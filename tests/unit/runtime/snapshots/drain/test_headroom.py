"""Nothing is written where there is no room for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.runtime.drained_slots import (
    drain_slot,
    expect_failed,
    expect_published,
    is_empty,
    set_free_space,
)
from support.slots import fill, snapshot

from grpo_run.runtime.rank.saving._spare_files import allocate
from grpo_run.runtime.snapshots._drain_worker import DISK_RESERVE_BYTES
from grpo_run.runtime.snapshots.area import StagingArea


@pytest.mark.parametrize("free", [0, 1 << 20, DISK_RESERVE_BYTES])
def test_a_disk_without_free_space_is_not_written_to(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """The reason names the missing size and the directory."""
    fill(staging.slots[0], snapshot(out, 5))
    set_free_space(monkeypatch, free)
    reply = expect_failed(drain_slot(staging))
    assert reply.full
    assert reply.step == 5
    assert "KiB are needed" in reply.reason
    assert reply.free_bytes == free
    assert str(out) in reply.reason
    assert is_empty(out)
    assert not staging.slots[0].drained


def test_a_snapshot_that_does_not_fit_leaves_no_folder(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may refuse an output directory that is not empty."""
    out.mkdir(parents=True)
    fill(staging.slots[0], snapshot(out, 5, scheduled=False))
    set_free_space(monkeypatch, 0)
    expect_failed(drain_slot(staging))
    assert list(out.iterdir()) == []


def test_free_space_is_required_for_the_files_only(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spare files are not written."""
    fill(staging.slots[0], snapshot(out, 5))
    allocate(staging.slots[0].spare / "x", 32 << 20)
    set_free_space(monkeypatch, DISK_RESERVE_BYTES + (1 << 20))
    expect_published(drain_slot(staging))
