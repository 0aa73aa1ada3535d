"""Draining one snapshot: it becomes a checkpoint, or a failure with a reason and no visible files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.slots import PLAIN, fill, snapshot, weights

from grpo_run.runtime.checkpoints import manifest as manifest_module
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import Manifest, read_manifest
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import sync_tree
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.buffer import SnapshotBuffer
from grpo_run.runtime.staging.draining import drain
from grpo_run.runtime.staging.draining.drain import DISK_RESERVE_BYTES, handle_request
from grpo_run.runtime.staging.draining.drain_messages import DrainFailed, DrainPublished, DrainRequest
from grpo_run.runtime.staging.headroom import Headroom
from grpo_run.runtime.staging.index import read_index

Usage = namedtuple("Usage", "total used free")


def drain_slot(staging: StagingArea, index: int = 0, **options: Any) -> DrainPublished | DrainFailed:
    """Send one request for a slot and return the reply."""
    return handle_request(staging, DrainRequest(slot=index, **options), lambda written_bytes: None)


def expect_published(reply: DrainPublished | DrainFailed) -> DrainPublished:
    """Require that the request succeeded."""
    assert isinstance(reply, DrainPublished), reply
    return reply


def expect_failed(reply: DrainPublished | DrainFailed) -> DrainFailed:
    """Require that the request failed."""
    assert isinstance(reply, DrainFailed), reply
    return reply


def is_empty(out: Path) -> bool:
    """Return True if the directory has neither checkpoints nor partial directories."""
    return not out.exists() or list(out.iterdir()) == []


def set_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Set the free space of the disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))


# ---- what is written ----


def test_a_drained_snapshot_is_a_verified_checkpoint(staging: StagingArea, out: Path) -> None:
    """With every rank's files and the trainer's own; the slot is marked drained."""
    fill(staging.slots[1], snapshot(out, 5, world_size=2))
    reply = expect_published(drain_slot(staging, 1))
    path = out / "checkpoint-5"
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    for rank in (0, 1):
        assert (path / f"model-{rank}.safetensors").read_bytes() == weights(rank, 5)
        record = torch._C.PyTorchFileReader(str(path / f"optimizer/rank{rank}.pt")).get_record("data/0")
        assert record == weights(rank, 5)
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
    assert (reply.scheduled, reply.durable, reply.removed) == (True, True, ())


def top_level_names(manifest: Manifest) -> set[str]:
    """First path components of the files."""
    return {name.partition("/")[0] for name in manifest.files}


def test_the_manifest_contains_what_the_rank_declared(staging: StagingArea, out: Path) -> None:
    """Run, call, step, world size, batch, and that the snapshot is not scheduled."""
    facts = {
        "global_batch": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "layout": "ddp",
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
    monkeypatch.setattr(drain, "SYNC_BYTES", 1000)
    fill(staging.slots[0], snapshot(out, 5, world_size=2))
    order: list[Any] = []

    def recorded(path: Path, progress: Callable[[int], None]) -> None:
        sync_tree(path, progress)
        order.append("sync")

    monkeypatch.setattr(drain, "sync_tree", recorded)
    monkeypatch.setattr(manifest_module, "sync_tree", recorded)
    expect_published(handle_request(staging, DrainRequest(slot=0), order.append))
    unsynced = before = 0
    for entry in order:
        if entry == "sync":
            unsynced = 0
            continue
        unsynced += entry - before
        before = entry
        assert unsynced <= 1000 + len(weights(0, 5))
    assert order.count("sync") >= 3
    assert order[-1] == "sync"


def test_an_older_checkpoint_of_the_same_call_is_replaced(staging: StagingArea, out: Path) -> None:
    """Nothing of it remains."""
    for scheduled in (False, True):
        fill(staging.slots[0], snapshot(out, 5, scheduled=scheduled))
        expect_published(drain_slot(staging))
    assert os.listdir(out) == ["checkpoint-5"]
    assert read_manifest(out / "checkpoint-5").scheduled


def test_a_directory_that_the_script_wrote_is_kept(staging: StagingArea, out: Path) -> None:
    """A script may save a model under any name; rotation does not delete it either."""
    own = out / "checkpoint-5"
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(b"the script's")
    fill(staging.slots[0], snapshot(out, 5, limit=1))
    expect_published(drain_slot(staging))
    verify_digests(own, read_manifest(own).files)
    fill(staging.slots[0], snapshot(out, 6, limit=1))
    expect_published(drain_slot(staging))
    assert sorted(os.listdir(out)) == ["checkpoint-6", "replaced-checkpoint-5"]
    assert (out / "replaced-checkpoint-5/model.safetensors").read_bytes() == b"the script's"


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

    monkeypatch.setattr(drain, "rotate", rotate)
    assert expect_published(drain_slot(staging)).removed == ()
    assert staging.slots[0].drained


@pytest.mark.parametrize("where", ["publish", "partial_directory"])
def test_a_read_error_of_the_disk_does_not_mark_the_snapshot_broken(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A manifest that was just written cannot be read back; a retry succeeds."""
    fill(staging.slots[0], snapshot(out, 5))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("no readable MANIFEST.json: Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(drain, where, fail)
        reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken, reply.full) == (5, False, False)
    assert is_empty(out)
    expect_published(drain_slot(staging))


def test_abandoned_partial_directories_are_deleted(staging: StagingArea, out: Path) -> None:
    """This happens before the next checkpoint is written."""
    (out / ".checkpoint-4.partial-1f3a").mkdir(parents=True)
    fill(staging.slots[0], snapshot(out, 5))
    expect_published(drain_slot(staging))
    assert os.listdir(out) == ["checkpoint-5"]


def test_the_scripts_limit_is_applied_after_publishing(staging: StagingArea, out: Path) -> None:
    """The reply names the deleted checkpoints."""
    for step in (1, 2, 3):
        fill(staging.slots[0], snapshot(out, step, limit=2))
        reply = expect_published(drain_slot(staging))
    assert sorted(os.listdir(out)) == ["checkpoint-2", "checkpoint-3"]
    assert [Path(path).name for path in reply.removed] == ["checkpoint-1"]


def test_a_newer_snapshot_drained_first_is_not_superseded(staging: StagingArea, out: Path) -> None:
    """Before a restart, step 9 is drained before step 5."""
    fill(staging.slots[0], snapshot(out, 5, limit=1))
    fill(staging.slots[1], snapshot(out, 9, limit=1, scheduled=False))
    expect_published(drain_slot(staging, 1))
    expect_published(drain_slot(staging, 0))
    assert sorted(os.listdir(out)) == ["_grpo_run", "checkpoint-5"]
    assert os.listdir(out / "_grpo_run/run-1/call-1") == ["snapshot-9"]
    assert (out / "_grpo_run").stat().st_mode & 0o777 == 0o700


def test_the_checkpoint_is_written_to_its_own_output_directory(staging: StagingArea, tmp_path: Path) -> None:
    """The slot may be reused by another call after the request was sent."""
    fill(staging.slots[0], snapshot(tmp_path / "second", 5, ordinal=2))
    assert expect_published(drain_slot(staging)).path == str(tmp_path / "second" / "checkpoint-5")


def test_a_restored_checkpoint_is_verified_but_not_durable(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written to memory; the disk is not used and the slot is not marked drained."""
    set_free_space(monkeypatch, 0)
    fill(staging.slots[0], snapshot(out, 5))
    reply = expect_published(drain_slot(staging, restore=str(staging.restore)))
    path = staging.restore / "checkpoint-5"
    verify_digests(path, read_manifest(path).files)
    assert (reply.path, reply.durable) == (str(path), False)
    assert not staging.slots[0].drained
    assert not out.exists()


# ---- what does not work ----


def test_an_empty_slot_fails_without_a_step(staging: StagingArea, out: Path) -> None:
    """No step means that the disk is not at fault."""
    reply = expect_failed(drain_slot(staging))
    assert (reply.slot, reply.step, reply.reason) == (0, None, "the slot is empty")
    assert not reply.full
    assert not reply.broken


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
    staging.slots[0].index_path(0).unlink()
    expect_failed(drain_slot(staging))
    assert not staging.slots[0].busy


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
    assert "MiB are needed" in reply.reason
    assert str(out) in reply.reason
    assert is_empty(out)
    assert not staging.slots[0].drained


def test_free_space_is_required_for_the_files_only(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer's memory may be larger than the files."""
    with SnapshotBuffer(staging.slots[0].buffer_path(7)) as buffer:
        buffer.reserve(32 << 20)
    fill(staging.slots[0], snapshot(out, 5))
    set_free_space(monkeypatch, DISK_RESERVE_BYTES + (1 << 20))
    expect_published(drain_slot(staging))


def test_a_restore_respects_every_memory_limit(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills a process that exceeds one, so the file system alone is not enough."""
    fill(staging.slots[0], snapshot(out, 5))
    monkeypatch.setattr(
        drain,
        "least_headroom",
        lambda folder: Headroom(name="a cgroup", free_bytes=1 << 20, total_bytes=1 << 30),
    )
    assert expect_failed(drain_slot(staging, restore=str(staging.restore))).full
    assert is_empty(staging.restore)
    expect_published(drain_slot(staging))


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Limit the size of files that this process can write, so that the kernel refuses real writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "plain"])
def test_a_failed_write_leaves_no_files(
    staging: StagingArea, out: Path, limit_file_size: Callable[[int], None], kind: str
) -> None:
    """From torch (RuntimeError) or others (OSError); the older checkpoint is unchanged."""
    fill(staging.slots[0], snapshot(out, 4))
    expect_published(drain_slot(staging))
    staged = fill(staging.slots[0], snapshot(out, 5, limit=1))
    if kind == "plain":
        (staging.slots[0].files / staged.folder / "vocab.bin").write_bytes(b"v" * 3000)
        staging.slots[0].index_path(0).write_text("{}")
    else:
        image = read_index(staging.slots[0].index_path(0))
        image.files = [file for file in image.files if file.kind == kind]
        staging.slots[0].index_path(0).write_bytes(image.to_json())
    limit_file_size(800)
    reply = expect_failed(drain_slot(staging))
    limit_file_size(resource.RLIM_INFINITY)
    assert (reply.step, reply.full, reply.broken) == (5, False, False)
    assert reply.reason
    assert os.listdir(out) == ["checkpoint-4"]
    verify_digests(out / "checkpoint-4", read_manifest(out / "checkpoint-4").files)
    expect_published(drain_slot(staging))
    assert os.listdir(out) == ["checkpoint-5"]


@pytest.mark.parametrize(("left", "full"), [(0, True), (1 << 20, True), (1 << 40, False)])
def test_a_torch_write_error_is_classified_by_the_free_space(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, left: int, full: bool
) -> None:
    """Torch does not report the errno."""
    fill(staging.slots[0], snapshot(out, 5))
    frees = iter([1 << 40, left])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, next(frees)))

    def write_files(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:874] .\n unexpected pos 64 vs 0")

    monkeypatch.setattr(drain, "write_files", write_files)
    reply = expect_failed(drain_slot(staging))
    assert reply.full is full
    assert ("No space left on device" if full else "Input/output error") in reply.reason
    assert "unexpected pos" in reply.reason
    assert "\n" not in reply.reason
    assert is_empty(out)


@pytest.mark.parametrize(
    ("error", "full", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "f"), True, "No space left on device (f)"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True, "Disk quota exceeded"),
        (OSError(errno.EROFS, "Read-only file system", "f"), False, "Read-only file system (f)"),
        (OSError("every name after it is taken"), False, "every name after it is taken"),
    ],
)
@pytest.mark.parametrize("where", ["_copy_tree", "write_files", "publish", "partial_directory"])
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

    monkeypatch.setattr(drain, where, fail)
    reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.reason, reply.full, reply.broken) == (5, reason, full, False)
    assert is_empty(out)
    assert not staging.slots[0].drained


def test_an_output_directory_that_cannot_be_created_is_a_failure(staging: StagingArea, out: Path) -> None:
    """A file has its name."""
    out.parent.mkdir(parents=True)
    out.write_bytes(b"")
    fill(staging.slots[0], snapshot(out, 5))
    assert expect_failed(drain_slot(staging)).reason.startswith("File exists")


@pytest.mark.parametrize(
    "damage",
    [
        lambda slot: slot.index_path(0).unlink(),
        lambda slot: slot.index_path(0).write_bytes(b'{"files": ['),
        lambda slot: slot.index_path(0).write_bytes(
            slot.index_path(0).read_bytes().replace(b"model-0", b"../../x")
        ),
        lambda slot: slot.buffer_path(0).unlink(),
        lambda slot: os.truncate(slot.buffer_path(0), 0),
        lambda slot: os.truncate(slot.buffer_path(0), 100),
    ],
)
def test_an_unreadable_snapshot_is_broken(
    staging: StagingArea, out: Path, damage: Callable[[Any], None]
) -> None:
    """A retry cannot succeed; no files are visible."""
    fill(staging.slots[0], snapshot(out, 5))
    damage(staging.slots[0])
    reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken, reply.full) == (5, True, False)
    assert is_empty(out)
    assert not staging.slots[0].drained


def test_a_snapshot_with_missing_trainer_files_is_broken(staging: StagingArea, out: Path) -> None:
    """A checkpoint without them would still pass verification."""
    fill(staging.slots[0], snapshot(out, 5))
    shutil.rmtree(staging.slots[0].files)
    reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken) == (5, True)
    assert is_empty(out)


def test_an_invalid_snapshot_record_is_a_failure(staging: StagingArea, out: Path) -> None:
    """The reply is that of an empty slot."""
    (staging.slots[0].path / "STAGED.json").write_text("{")
    reply = expect_failed(drain_slot(staging))
    assert reply.step is None
    assert "STAGED.json" in reply.reason
