"""A drain that fails gives a reason and leaves no visible files.

Only a snapshot that cannot be read is broken.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.drained_slots import (
    drain_slot,
    expect_failed,
    expect_published,
    is_empty,
    set_free_space,
)
from support.slots import fill, snapshot

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.publishing import begin_attempt
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.saving._spare_files import allocate
from grpo_run.runtime.snapshots import _drain_worker as drain_worker
from grpo_run.runtime.snapshots._drain_messages import DrainRequest
from grpo_run.runtime.snapshots._drain_worker import DISK_RESERVE_BYTES, handle_request
from grpo_run.runtime.snapshots.area import StagingArea


def test_a_slot_that_a_rank_is_writing_fails_after_a_wait(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is shorter than what counts as a stall."""
    fill(staging.slots[0], snapshot(out, 5))
    waits: list[float] = []
    original = type(staging.slots[0]).locked

    @contextmanager
    def locked(slot: Any, wait_seconds: float = 0.0, *, shared: bool = False) -> Iterator[bool]:
        waits.append(wait_seconds)
        with original(slot, 0.0, shared=shared) as mine:
            yield mine

    with staging.slots[0].locked():
        monkeypatch.setattr(type(staging.slots[0]), "locked", locked)
        reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.reason) == (None, "a rank is writing the slot")
    assert 0 < waits[0] < 60.0, "shorter than what is called a stall"
    assert is_empty(out)


def test_the_slot_is_locked_during_the_drain(staging: StagingArea, out: Path) -> None:
    """The lock is released afterwards, also after a failure."""
    fill(staging.slots[0], snapshot(out, 5))
    busy: list[bool] = []
    expect_published(
        handle_request(staging, DrainRequest(slot=0), lambda written: busy.append(staging.slots[0].busy))
    )
    assert busy
    assert all(busy)
    assert not staging.slots[0].busy
    shutil.rmtree(staging.slots[0].files)
    expect_failed(drain_slot(staging))
    assert not staging.slots[0].busy


@pytest.mark.parametrize(
    ("error", "full", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "f"), True, "No space left on device (f)"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True, "Disk quota exceeded"),
        (OSError(errno.EROFS, "Read-only file system", "f"), False, "Read-only file system (f)"),
        (OSError("every name after it is taken"), False, "every name after it is taken"),
    ],
)
@pytest.mark.parametrize("where", ["_copy_tree", "publish", "partial_directory"])
def test_every_file_system_error_becomes_a_failure(
    staging: StagingArea,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: OSError,
    full: bool,
    reason: str,
) -> None:
    """The failure has the system's message."""
    fill(staging.slots[0], snapshot(out, 5))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(drain_worker, where, fail)
    reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.reason, reply.full, reply.broken) == (5, reason, full, False)
    assert is_empty(out)
    assert not staging.slots[0].drained


@pytest.mark.parametrize("where", ["publish", "partial_directory"])
def test_a_read_error_of_the_disk_does_not_mark_the_snapshot_broken(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A manifest that was just written cannot be read back; a retry succeeds."""
    fill(staging.slots[0], snapshot(out, 5))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("no readable MANIFEST.json: Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(drain_worker, where, fail)
        reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken, reply.full) == (5, False, False)
    assert is_empty(out)
    expect_published(drain_slot(staging))


def test_free_space_is_required_for_the_files_only(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spare files are not written."""
    fill(staging.slots[0], snapshot(out, 5))
    allocate(staging.slots[0].spare / "x", 32 << 20)
    set_free_space(monkeypatch, DISK_RESERVE_BYTES + (1 << 20))
    expect_published(drain_slot(staging))


def test_a_superseded_host_publishes_when_it_takes_part_again(staging: StagingArea, out: Path) -> None:
    """Its snapshot may be of an older attempt."""
    fill(staging.slots[0], snapshot(out, 5))
    run_id = snapshot(out, 5).run_id
    fencing.record(staging.path, out, fencing.prepare(out, run_id), made=True)
    fence = fencing.prepare(out, run_id)
    begin_attempt(fence, out, run_id)
    reply = expect_failed(drain_slot(staging))
    assert (
        reply.reason == "a newer attempt of this run has begun on other hosts; checkpoint-5 is not published"
    )
    assert not reply.broken
    assert list(out.glob("*checkpoint*")) == []
    fencing.record(staging.path, out, fence, made=False)
    expect_published(drain_slot(staging))
    assert list(fence.iterdir()) == []
