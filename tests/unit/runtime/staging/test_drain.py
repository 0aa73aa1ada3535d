"""A snapshot becomes a checkpoint, or an answer that says why not; nothing in between is ever seen."""

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
from grpo_run.runtime.staging import drain
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.buffer import SnapshotBuffer
from grpo_run.runtime.staging.drain import DISK_RESERVE_BYTES, handle_request
from grpo_run.runtime.staging.drain_messages import DrainFailed, DrainPublished, DrainRequest
from grpo_run.runtime.staging.headroom import Headroom
from grpo_run.runtime.staging.index import read_index

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    """Three empty slots."""
    return StagingArea(tmp_path / "memory")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The script's output directory, which nobody has made yet."""
    return tmp_path / "disk" / "out"


def request(staging: StagingArea, index: int = 0, **options: Any) -> DrainPublished | DrainFailed:
    """What one request is answered."""
    return handle_request(staging, DrainRequest(slot=index, **options), lambda written_bytes: None)


def published(answered: DrainPublished | DrainFailed) -> DrainPublished:
    """It worked."""
    assert isinstance(answered, DrainPublished), answered
    return answered


def failed(answered: DrainPublished | DrainFailed) -> DrainFailed:
    """It did not."""
    assert isinstance(answered, DrainFailed), answered
    return answered


def nothing_to_be_seen(out: Path) -> bool:
    """No checkpoint and nothing half-written."""
    return not out.exists() or list(out.iterdir()) == []


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The disk has that much room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))


# ---- what is written ----


def test_a_drained_snapshot_is_a_complete_checkpoint(staging: StagingArea, out: Path) -> None:
    """Every rank's part and the trainer's own files; it verifies, and the slot may be used again."""
    fill(staging.slots[1], snapshot(out, 5, world_size=2))
    answered = published(request(staging, 1))
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
    assert set(os.listdir(path)) == {*manifest_tops(manifest), "MANIFEST.json"}
    assert staging.slots[1].drained
    assert (answered.slot, answered.step, answered.train_call, answered.path) == (1, 5, 1, str(path))
    assert (
        answered.size_bytes
        == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        - (path / "MANIFEST.json").stat().st_size
    )
    assert (answered.scheduled, answered.durable, answered.removed) == (True, True, ())


def manifest_tops(manifest: Manifest) -> set[str]:
    """First parts of the files' names."""
    return {name.partition("/")[0] for name in manifest.files}


def test_the_manifest_says_what_the_rank_declared(staging: StagingArea, out: Path) -> None:
    """Run, call, step, world and batch, and that nobody asked for it."""
    facts = {
        "global_batch": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "layout": "ddp",
        "model_shape": "abc",
    }  # fmt: skip
    staged = fill(staging.slots[0], snapshot(out, 7, scheduled=False, ordinal=2, world_size=2, **facts))
    published(request(staging))
    manifest = read_manifest(out / "checkpoint-7")
    for name in ("run_id", "train_call", "step", "world_size", "scheduled", "versions"):
        assert getattr(manifest, name) == getattr(staged, name)
    assert manifest.model_dump(include=set(facts)) == facts
    assert not manifest.finished


def test_progress_adds_up(staging: StagingArea, out: Path) -> None:
    """Of all that is written, the trainer's own files too."""
    fill(staging.slots[0], snapshot(out, 5, world_size=2))
    seen: list[int] = []
    published(handle_request(staging, DrainRequest(slot=0), seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == sum(map(len, PLAIN.values())) + 2 * (len(weights(0, 5)) + len(weights(1, 5)))


def test_what_is_reported_is_on_disk(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it goes: pages that only wait to be written are no progress, and would all be waited for at the end."""
    monkeypatch.setattr(drain, "SYNC_BYTES", 1000)
    fill(staging.slots[0], snapshot(out, 5, world_size=2))
    order: list[Any] = []

    def recorded(path: Path, progress: Callable[[int], None]) -> None:
        sync_tree(path, progress)
        order.append("sync")

    monkeypatch.setattr(drain, "sync_tree", recorded)
    monkeypatch.setattr(manifest_module, "sync_tree", recorded)
    published(handle_request(staging, DrainRequest(slot=0), order.append))
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


def test_an_older_one_of_the_same_name_is_replaced(staging: StagingArea, out: Path) -> None:
    """Of the same call; nothing of it is left."""
    for scheduled in (False, True):
        fill(staging.slots[0], snapshot(out, 5, scheduled=scheduled))
        published(request(staging))
    assert os.listdir(out) == ["checkpoint-5"]
    assert read_manifest(out / "checkpoint-5").scheduled


@pytest.mark.parametrize("scheduled", [True, False])
def test_what_the_script_wrote_under_that_name_is_kept(
    staging: StagingArea, out: Path, scheduled: bool
) -> None:
    """A script may save a model under any name; superseded, a snapshot of ours takes nothing with it."""
    own = out / "checkpoint-5"
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(b"the script's")
    fill(staging.slots[0], snapshot(out, 5, scheduled=scheduled, limit=1))
    published(request(staging))
    verify_digests(own, read_manifest(own).files)
    fill(staging.slots[0], snapshot(out, 6, limit=1))
    published(request(staging))
    assert sorted(os.listdir(out)) == ["checkpoint-6", "replaced-checkpoint-5"]
    assert (out / "replaced-checkpoint-5/model.safetensors").read_bytes() == b"the script's"


def test_the_trainers_own_files_keep_their_modes(staging: StagingArea, out: Path) -> None:
    """A script that can be run from its checkpoint, or a file that nobody else may read."""
    staged = fill(staging.slots[0], snapshot(out, 5))
    modes = dict(zip(PLAIN, (0o600, 0o755), strict=True))
    for name, mode in modes.items():
        (staging.slots[0].files / staged.folder / name).chmod(mode)
    published(request(staging))
    assert {name: (out / "checkpoint-5" / name).stat().st_mode & 0o777 for name in PLAIN} == modes


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), CheckpointError("unreadable")])
def test_rotation_that_fails_takes_nothing_back(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The checkpoint is there; what should have gone goes next time."""
    fill(staging.slots[0], snapshot(out, 5))

    def rotate(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(drain, "rotate", rotate)
    assert published(request(staging)).removed == ()
    assert staging.slots[0].drained


@pytest.mark.parametrize("where", ["publish", "partial_directory"])
def test_a_disk_that_cannot_be_read_does_not_make_the_snapshot_broken(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A manifest that was just written and cannot be read back: another time it may work."""
    fill(staging.slots[0], snapshot(out, 5))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("no readable MANIFEST.json: Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(drain, where, fail)
        answered = failed(request(staging))
    assert (answered.step, answered.broken, answered.full) == (5, False, False)
    assert nothing_to_be_seen(out)
    published(request(staging))


def test_what_died_half_written_is_cleaned_up(staging: StagingArea, out: Path) -> None:
    """By the next one that writes there."""
    (out / ".checkpoint-4.partial-1f3a").mkdir(parents=True)
    fill(staging.slots[0], snapshot(out, 5))
    published(request(staging))
    assert os.listdir(out) == ["checkpoint-5"]


def test_older_ones_go_by_the_scripts_limit(staging: StagingArea, out: Path) -> None:
    """Only when the new one is there; what went is told."""
    for step in (1, 2, 3):
        fill(staging.slots[0], snapshot(out, step, limit=2))
        answered = published(request(staging))
    assert sorted(os.listdir(out)) == ["checkpoint-2", "checkpoint-3"]
    assert [Path(path).name for path in answered.removed] == ["checkpoint-1"]


def test_the_newest_drained_first_is_not_taken_for_superseded(staging: StagingArea, out: Path) -> None:
    """As before a restart: step 9, which nobody asked for, and then step 5, which was waiting."""
    fill(staging.slots[0], snapshot(out, 5, limit=1))
    fill(staging.slots[1], snapshot(out, 9, limit=1, scheduled=False))
    published(request(staging, 1))
    published(request(staging, 0))
    assert sorted(os.listdir(out)) == ["checkpoint-5", "checkpoint-9"]


def test_it_goes_where_its_own_call_wants_it(staging: StagingArea, tmp_path: Path) -> None:
    """The slot may have been given to another call since somebody decided on it."""
    fill(staging.slots[0], snapshot(tmp_path / "second", 5, ordinal=2))
    assert published(request(staging)).path == str(tmp_path / "second" / "checkpoint-5")


def test_a_restored_one_is_loadable_and_not_durable(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, for a restart; the disk is not touched, and the slot still waits for it."""
    disk(monkeypatch, 0)
    fill(staging.slots[0], snapshot(out, 5))
    answered = published(request(staging, restore=str(staging.restore)))
    path = staging.restore / "checkpoint-5"
    verify_digests(path, read_manifest(path).files)
    assert (answered.path, answered.durable) == (str(path), False)
    assert not staging.slots[0].drained
    assert not out.exists()


# ---- what does not work ----


def test_an_empty_slot_is_an_answer(staging: StagingArea, out: Path) -> None:
    """Without a step: nobody is to be alarmed."""
    answered = failed(request(staging))
    assert (answered.slot, answered.step, answered.reason) == (0, None, "the slot is empty")
    assert not answered.full
    assert not answered.broken


def test_a_slot_that_is_being_written_is_left_alone(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while; what is in it is not what it will be."""
    fill(staging.slots[0], snapshot(out, 5))
    waits: list[float] = []
    original = type(staging.slots[0]).locked

    @contextmanager
    def locked(slot: Any, wait_seconds: float = 0.0) -> Iterator[bool]:
        waits.append(wait_seconds)
        with original(slot, 0.0) as mine:
            yield mine

    with staging.slots[0].locked():
        monkeypatch.setattr(type(staging.slots[0]), "locked", locked)
        answered = failed(request(staging))
    assert (answered.step, answered.reason) == (None, "a rank is writing the slot")
    assert 0 < waits[0] < 60.0, "shorter than what is called a stall"
    assert nothing_to_be_seen(out)


def test_the_slot_is_held_while_it_is_read(staging: StagingArea, out: Path) -> None:
    """And let go afterwards, also after a failure."""
    fill(staging.slots[0], snapshot(out, 5))
    busy: list[bool] = []
    published(
        handle_request(staging, DrainRequest(slot=0), lambda written: busy.append(staging.slots[0].busy))
    )
    assert busy
    assert all(busy)
    assert not staging.slots[0].busy
    staging.slots[0].index_path(0).unlink()
    failed(request(staging))
    assert not staging.slots[0].busy


@pytest.mark.parametrize("free", [0, 1 << 20, DISK_RESERVE_BYTES])
def test_a_disk_without_room_is_not_begun_on(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """With how much is missing, and where."""
    fill(staging.slots[0], snapshot(out, 5))
    disk(monkeypatch, free)
    answered = failed(request(staging))
    assert answered.full
    assert answered.step == 5
    assert "MiB are needed" in answered.reason
    assert str(out) in answered.reason
    assert nothing_to_be_seen(out)
    assert not staging.slots[0].drained


def test_room_is_asked_for_what_will_be_written(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for all the memory of the slot: arenas keep what larger checkpoints, and more ranks, once took."""
    with SnapshotBuffer(staging.slots[0].buffer_path(7)) as arena:
        arena.reserve(32 << 20)
    fill(staging.slots[0], snapshot(out, 5))
    disk(monkeypatch, DISK_RESERVE_BYTES + (1 << 20))
    published(request(staging))


def test_memory_is_not_filled_to_the_brim(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the kernel kills instead of refusing: every limit is asked, not the file system alone."""
    fill(staging.slots[0], snapshot(out, 5))
    monkeypatch.setattr(
        drain,
        "least_headroom",
        lambda folder: Headroom(name="a cgroup", free_bytes=1 << 20, total_bytes=1 << 30),
    )
    assert failed(request(staging, restore=str(staging.restore))).full
    assert nothing_to_be_seen(staging.restore)
    published(request(staging))


@pytest.fixture
def no_file_above() -> Iterator[Callable[[int], None]]:
    """Limits how large a file this process may write: the kernel then refuses real writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "plain"])
def test_a_write_that_fails_leaves_nothing(
    staging: StagingArea, out: Path, no_file_above: Callable[[int], None], kind: str
) -> None:
    """Whoever writes: torch says it with a RuntimeError, others with an OSError; the older checkpoint stays."""
    fill(staging.slots[0], snapshot(out, 4))
    published(request(staging))
    staged = fill(staging.slots[0], snapshot(out, 5, limit=1))
    if kind == "plain":
        (staging.slots[0].files / staged.folder / "vocab.bin").write_bytes(b"v" * 3000)
        staging.slots[0].index_path(0).write_text("{}")
    else:
        image = read_index(staging.slots[0].index_path(0))
        image.files = [file for file in image.files if file.kind == kind]
        staging.slots[0].index_path(0).write_bytes(image.to_json())
    no_file_above(800)
    answered = failed(request(staging))
    no_file_above(resource.RLIM_INFINITY)
    assert (answered.step, answered.full, answered.broken) == (5, False, False)
    assert answered.reason
    assert os.listdir(out) == ["checkpoint-4"]
    verify_digests(out / "checkpoint-4", read_manifest(out / "checkpoint-4").files)
    published(request(staging))
    assert os.listdir(out) == ["checkpoint-5"]


@pytest.mark.parametrize(("left", "full"), [(0, True), (1 << 20, True), (1 << 40, False)])
def test_torchs_own_word_for_a_full_disk_is_understood(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, left: int, full: bool
) -> None:
    """It keeps the number of the error to itself: what is left on the disk tells."""
    fill(staging.slots[0], snapshot(out, 5))
    frees = iter([1 << 40, left])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, next(frees)))

    def write_files(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:874] .\n unexpected pos 64 vs 0")

    monkeypatch.setattr(drain, "write_files", write_files)
    answered = failed(request(staging))
    assert answered.full is full
    assert ("No space left on device" if full else "Input/output error") in answered.reason
    assert "unexpected pos" in answered.reason
    assert "\n" not in answered.reason
    assert nothing_to_be_seen(out)


@pytest.mark.parametrize(
    ("error", "full", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "f"), True, "No space left on device (f)"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True, "Disk quota exceeded"),
        (OSError(errno.EROFS, "Read-only file system", "f"), False, "Read-only file system (f)"),
        (OSError("every name after it is taken"), False, "every name after it is taken"),
    ],
)
@pytest.mark.parametrize("where", ["_copy_tree", "write_files", "publish", "partial_directory"])
def test_every_error_of_a_file_system_is_an_answer(
    staging: StagingArea,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: OSError,
    full: bool,
    says: str,
) -> None:
    """With its words; wherever it comes."""
    fill(staging.slots[0], snapshot(out, 5))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(drain, where, fail)
    answered = failed(request(staging))
    assert (answered.step, answered.reason, answered.full, answered.broken) == (5, says, full, False)
    assert nothing_to_be_seen(out)
    assert not staging.slots[0].drained


def test_an_output_directory_that_cannot_be_made_is_an_answer(staging: StagingArea, out: Path) -> None:
    """A file has its name."""
    out.parent.mkdir(parents=True)
    out.write_bytes(b"")
    fill(staging.slots[0], snapshot(out, 5))
    assert failed(request(staging)).reason.startswith("File exists")


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
def test_a_snapshot_that_cannot_be_read_is_said_to_be_broken(
    staging: StagingArea, out: Path, damage: Callable[[Any], None]
) -> None:
    """There is no use in trying again; nothing of it is seen."""
    fill(staging.slots[0], snapshot(out, 5))
    damage(staging.slots[0])
    answered = failed(request(staging))
    assert (answered.step, answered.broken, answered.full) == (5, True, False)
    assert nothing_to_be_seen(out)
    assert not staging.slots[0].drained


def test_a_snapshot_whose_files_cannot_be_listed_is_not_written_without_them(
    staging: StagingArea, out: Path
) -> None:
    """A checkpoint that lacks what the trainer wrote would verify all the same."""
    fill(staging.slots[0], snapshot(out, 5))
    shutil.rmtree(staging.slots[0].files)
    answered = failed(request(staging))
    assert (answered.step, answered.broken) == (5, True)
    assert nothing_to_be_seen(out)


def test_what_is_declared_unreadably_is_an_answer(staging: StagingArea, out: Path) -> None:
    """As an empty slot."""
    (staging.slots[0].path / "STAGED.json").write_text("{")
    answered = failed(request(staging))
    assert answered.step is None
    assert "STAGED.json" in answered.reason
