"""A drained snapshot is a complete, verified checkpoint in its own directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.drained_slots import drain_slot, expect_published
from support.slots import PLAIN, fill, snapshot, weights

from grpo_run.runtime.checkpoints import manifest as manifest_module
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import Manifest, read_manifest
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import sync_tree
from grpo_run.runtime.snapshots import _drain_worker as drain_worker
from grpo_run.runtime.snapshots._drain_messages import DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea


def test_a_drained_snapshot_is_a_verified_checkpoint(staging: StagingArea, out: Path) -> None:
    """With every rank's files and the trainer's own; the slot is marked drained."""
    fill(staging.slots[1], snapshot(out, 5, world_size=2))
    reply = expect_published(drain_slot(staging, 1))
    path = out / "checkpoint-5"
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    for rank in (0, 1):
        assert (path / f"model-{rank}.safetensors").read_bytes() == weights(rank, 5)
        assert (path / f"optimizer/rank{rank}.pt").read_bytes() == weights(rank, 5)
    for name, content in PLAIN.items():
        assert (path / name).read_bytes() == content
    assert os.listdir(out) == ["checkpoint-5"]
    assert set(os.listdir(path)) == {*top_level_names(manifest), "MANIFEST.json"}
    assert staging.slots[1].drained
    assert (reply.slot, reply.step, reply.train_call, reply.path) == (1, 5, 1, str(path))
    assert (
        reply.size_bytes
        == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        - (path / "MANIFEST.json").stat().st_size
    )
    assert (reply.scheduled, reply.removed) == (True, ())


def top_level_names(manifest: Manifest) -> set[str]:
    """First path components of the files."""
    return {name.partition("/")[0] for name in manifest.files}


def test_the_manifest_contains_what_the_rank_declared(staging: StagingArea, out: Path) -> None:
    """Run, call, step, world size, batch, and that the snapshot is not scheduled."""
    facts = {
        "global_batch": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "layout": "ddp",
        "model_shape": "abc",
    }  # fmt: skip
    staged = fill(staging.slots[0], snapshot(out, 7, scheduled=False, ordinal=2, world_size=2, **facts))
    expect_published(drain_slot(staging))
    manifest = read_manifest(out / "_grpo_run/run-1/call-2/snapshot-7")
    for name in ("run_id", "train_call", "step", "world_size", "scheduled", "versions"):
        assert getattr(manifest, name) == getattr(staged, name)
    assert manifest.model_dump(include=set(facts)) == facts
    assert not manifest.finished


def test_progress_adds_up_to_all_written_bytes(staging: StagingArea, out: Path) -> None:
    """The sum includes the trainer's own files."""
    fill(staging.slots[0], snapshot(out, 5, world_size=2))
    seen: list[int] = []
    expect_published(handle_request(staging, DrainRequest(slot=0), seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == sum(map(len, PLAIN.values())) + 2 * (len(weights(0, 5)) + len(weights(1, 5)))


def test_reported_progress_is_synced_in_steps(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dirty pages are no progress: all of them would delay the final fsync."""
    monkeypatch.setattr(drain_worker, "SYNC_BYTES", 1000)
    fill(staging.slots[0], snapshot(out, 5, world_size=2))
    order: list[Any] = []

    def recorded(path: Path, progress: Callable[[int], None]) -> None:
        sync_tree(path, progress)
        order.append("sync")

    monkeypatch.setattr(drain_worker, "sync_tree", recorded)
    monkeypatch.setattr(manifest_module, "sync_tree", recorded)
    expect_published(handle_request(staging, DrainRequest(slot=0), order.append))
    unsynced = before = 0
    for entry in order:
        if entry == "sync":
            unsynced = 0
            continue
        unsynced += entry - before
        before = entry
        assert unsynced <= 1000 + 2 * len(weights(0, 5))
    assert order.count("sync") >= 3
    assert order[-1] == "sync"


def test_the_trainers_files_keep_their_modes(staging: StagingArea, out: Path) -> None:
    """Executable and private files."""
    staged = fill(staging.slots[0], snapshot(out, 5))
    modes = dict(zip(PLAIN, (0o600, 0o755), strict=True))
    for name, mode in modes.items():
        (staging.slots[0].files / staged.folder / name).chmod(mode)
    expect_published(drain_slot(staging))
    assert {name: (out / "checkpoint-5" / name).stat().st_mode & 0o777 for name in PLAIN} == modes


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), CheckpointError("unreadable")])
def test_a_failed_rotation_does_not_fail_the_drain(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The next drain rotates again."""
    fill(staging.slots[0], snapshot(out, 5))

    def rotate(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(drain_worker, "rotate", rotate)
    assert expect_published(drain_slot(staging)).removed == ()
    assert staging.slots[0].drained


def test_the_checkpoint_is_written_to_its_own_output_directory(staging: StagingArea, tmp_path: Path) -> None:
    """The slot may be reused by another call after the request was sent."""
    fill(staging.slots[0], snapshot(tmp_path / "second", 5, ordinal=2))
    assert expect_published(drain_slot(staging)).path == str(tmp_path / "second" / "checkpoint-5")
