"""A trainer loads from a snapshot in memory what it would load from the checkpoint's files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from support.slots import held
from support.snapshots import TAKEN, SnapshotTrainer, take

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.resuming.loading import serve_loads
from grpo_run.runtime.rank.resuming.snapshot_folder import OpenSnapshot
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.area import LOADING, StagingArea
from grpo_run.runtime.snapshots.drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.snapshots.drain_worker import handle_request
from grpo_run.runtime.snapshots.slot import SnapshotName, StagingSlot

VALUES = 400_000
"""Of one tensor: more than a file must have to be served from memory."""
SMALL = {"base_lrs": [0.1]}


class LargeTrainer(SnapshotTrainer):
    """A trainer whose weights and optimizer state are served from memory, and whose scheduler is written."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self.weights = torch.arange(float(VALUES))
        self.moments = {
            "exp_avg": torch.rand(VALUES),
            "half": torch.rand(VALUES).bfloat16(),
            "step": torch.tensor(7.0),
            "empty": torch.empty(0),
        }

    def write(self, folder: Path) -> None:
        """Write two large files, a small one, and one that torch does not write."""
        tied = self.weights.view(2, -1)
        state = {
            "state": {0: self.moments, 1: {"view": self.moments["exp_avg"][10:20]}},
            "param_groups": [{"lr": 0.1}],
        }
        safetensors.torch.save_file(
            {"weight": tied, "steps": torch.arange(3), "half": self.moments["half"]},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        torch.save(state, folder / "optimizer.pt")
        torch.save(SMALL, folder / "scheduler.pt")
        (folder / "trainer_state.json").write_text('{"global_step": 5}')


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    return StagingArea(tmp_path / "memory")


@pytest.fixture
def trainer(tmp_path: Path) -> LargeTrainer:
    return LargeTrainer(tmp_path / "out")


@pytest.fixture
def files(trainer: LargeTrainer, tmp_path: Path) -> Path:
    """The checkpoint as torch and safetensors write it."""
    folder = tmp_path / "direct" / "checkpoint-5"
    folder.mkdir(parents=True)
    trainer.write(folder)
    return folder


@pytest.fixture
def full(session: Any, staging: StagingArea, trainer: LargeTrainer) -> StagingSlot:
    """The slot with the snapshot."""
    snapshots = Snapshots(session, staging)
    assert take(snapshots, trainer) == TAKEN
    assert snapshots.last is not None
    snapshots.close()
    return snapshots.last[0]


def name_of(full: StagingSlot) -> SnapshotName:
    staged = full.read_snapshot()
    assert staged is not None
    return SnapshotName(slot=full.index, order=staged.order)


@pytest.fixture
def opened(staging: StagingArea, full: StagingSlot) -> Iterator[OpenSnapshot]:
    """The snapshot, open, with the directory to load it from."""
    made = OpenSnapshot(staging, name_of(full), threads=2)
    made.make_folder()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _libraries_are_restored() -> Iterator[None]:
    """Check after every test that the load functions are the original ones."""
    before = (torch.load, torch.serialization.load, safetensors.torch.load_file, safetensors.safe_open)
    yield
    assert (
        torch.load,
        torch.serialization.load,
        safetensors.torch.load_file,
        safetensors.safe_open,
    ) == before


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, left.stride()) == (
            right.dtype,
            right.shape,
            right.stride(),
        ) and torch.equal(left, right)
    return bool(left == right)


def load(folder: Path) -> dict[str, Any]:
    """Load every file as transformers does."""
    return {
        "model": safetensors.torch.load_file(folder / "model.safetensors", device="cpu"),
        "optimizer": torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True),
        "scheduler": torch.load(str(folder / "scheduler.pt"), weights_only=True),
        "state": (folder / "trainer_state.json").read_bytes(),
    }


def test_what_is_loaded_equals_what_the_files_contain(opened: OpenSnapshot, files: Path) -> None:
    """Values, types, shapes, strides, names and their order; the large files are never written."""
    folder = opened.checkpoint.path
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert (sizes["model.safetensors"], sizes["optimizer.pt"]) == (0, 0)
    assert sizes["scheduler.pt"] > 0
    with serve_loads(opened.folder):
        loaded = load(folder)
    assert equal(loaded, load(files))
    views = loaded["optimizer"]["state"]
    assert views[1]["view"].untyped_storage().data_ptr() == views[0]["exp_avg"].untyped_storage().data_ptr()
    assert not (folder / "optimizer.pt").stat().st_size


def test_no_tensor_refers_to_the_slot(opened: OpenSnapshot, full: StagingSlot, files: Path) -> None:
    """After the slot was overwritten, and after it was unmapped, every value is what it was."""
    expected = load(files)
    with serve_loads(opened.folder):
        loaded = load(opened.checkpoint.path)
    with open(full.buffer_path(0), "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = b"\xff" * len(memory)
    assert equal(loaded, expected)
    opened.close()
    assert equal(loaded, expected)


def test_tensors_of_two_files_share_no_memory_while_they_are_used(opened: OpenSnapshot, files: Path) -> None:
    """What the first file's tensors gave back is used again; what is still referred to is not."""
    path = opened.checkpoint.path
    with serve_loads(opened.folder):
        weights = safetensors.torch.load_file(path / "model.safetensors")
        kept = weights["weight"][0]
        del weights
        first = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        del kept
        second = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        third = safetensors.torch.load_file(path / "model.safetensors")
        third["weight"].zero_()
        second["state"][0]["exp_avg"].zero_()
    assert equal(first, load(files)["optimizer"])
    assert not second["state"][0]["exp_avg"].any()


def test_memory_is_used_again_when_all_tensors_of_a_file_are_gone(opened: OpenSnapshot) -> None:
    """The weights are dropped before the optimizer's state is loaded."""
    path = opened.checkpoint.path
    with serve_loads(opened.folder):
        weights = safetensors.torch.load_file(path / "model.safetensors")
        first = min(tensor.data_ptr() for tensor in weights.values() if tensor.nbytes > 1 << 20)
        del weights
        state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        assert state["state"][0]["exp_avg"].data_ptr() == first


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=False),
        lambda folder: torch.load(folder / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True),
        lambda folder: torch.load(folder / "optimizer.pt", lambda storage, _: storage, weights_only=True),
    ],
    ids=["all-types", "mapped", "function"],
)
def test_other_ways_to_load_get_the_same(
    opened: OpenSnapshot, files: Path, read: Callable[[Path], Any]
) -> None:
    """What cannot be served is written to the directory first, and then read by the library."""
    with serve_loads(opened.folder):
        assert equal(read(opened.checkpoint.path), read(files))


def test_an_opened_safetensors_file_is_written_first(opened: OpenSnapshot, files: Path) -> None:
    """Its reader maps the file itself; the bytes are those that safetensors would have written."""
    path = opened.checkpoint.path / "model.safetensors"
    with serve_loads(opened.folder), safetensors.safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("weight"), torch.arange(float(VALUES)).view(2, -1))
    assert path.read_bytes() == (files / "model.safetensors").read_bytes()
    assert sorted(one.name for one in path.parent.parent.iterdir()) == ["checkpoint-5"]


def test_a_reader_that_is_not_served_fails(opened: OpenSnapshot) -> None:
    """An empty file cannot be taken for its content."""
    folder = opened.checkpoint.path
    with pytest.raises(EOFError):
        torch.load(folder / "optimizer.pt", weights_only=True)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(folder / "model.safetensors")


def test_a_load_function_of_the_script_is_called(
    opened: OpenSnapshot, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts replace `torch.load`, for example to set `weights_only`; it finds the file."""
    original, called = torch.load, []

    def load_logged(*args: Any, **kwargs: Any) -> Any:
        called.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load_logged)
    path = opened.checkpoint.path / "optimizer.pt"
    with serve_loads(opened.folder):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    monkeypatch.undo()
    assert called == [path]
    assert equal(loaded, load(files)["optimizer"])


def test_loads_elsewhere_pass_through(opened: OpenSnapshot, files: Path) -> None:
    """The script may load other files of the same name meanwhile."""
    torch.save({"other": 1}, files / "optimizer.pt")
    with serve_loads(opened.folder):
        assert torch.load(files / "optimizer.pt", weights_only=True) == {"other": 1}


def test_the_drain_worker_writes_while_ranks_load(
    staging: StagingArea, full: StagingSlot, opened: OpenSnapshot, files: Path, trainer: LargeTrainer
) -> None:
    """Both read the slot at the same time, and no rank may write it."""
    with serve_loads(opened.folder):
        before = torch.load(opened.checkpoint.path / "optimizer.pt", map_location="cpu", weights_only=True)
        reply = handle_request(staging, DrainRequest(slot=full.index), lambda written: None)
        assert isinstance(reply, DrainPublished)
        assert full.busy
        assert staging.choose_slot() != full
        assert equal(load(opened.checkpoint.path), load(files))
    assert equal(before, load(trainer.output / "checkpoint-5")["optimizer"])
    opened.close()
    assert not full.busy


@pytest.mark.parametrize(
    "damage",
    [
        lambda slot: slot.index_path(0).unlink(),
        lambda slot: slot.index_path(0).write_bytes(b"{}x"),
        lambda slot: os.truncate(slot.buffer_path(0), VALUES),
        lambda slot: (slot.files / "checkpoint-5" / "trainer_state.json").write_text("{}"),
        lambda slot: slot.begin_snapshot(),
        lambda slot: (slot.path / "STAGED.json").write_text("{"),
    ],
    ids=["no index", "damaged index", "truncated buffer", "changed file", "being written", "damaged record"],
)
def test_a_damaged_snapshot_is_not_opened(
    staging: StagingArea, full: StagingSlot, damage: Callable[[StagingSlot], None]
) -> None:
    """It was complete when the supervisor named it, and is checked again before anything is loaded."""
    name = name_of(full)
    damage(full)
    with pytest.raises(CheckpointError):
        OpenSnapshot(staging, name, threads=1)
    assert not full.busy
    assert not (staging.path / LOADING).exists()


def test_another_snapshot_in_the_slot_is_not_opened(
    session: Any, staging: StagingArea, full: StagingSlot, trainer: LargeTrainer
) -> None:
    """The slot was written again since the supervisor looked."""
    name = name_of(full)
    with pytest.raises(CheckpointError, match="no longer holds"):
        OpenSnapshot(staging, name.model_copy(update={"order": (0, 1, 4, 1000.0)}), threads=1)


def test_a_slot_that_is_being_written_is_not_opened(
    staging: StagingArea, full: StagingSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer holds its lock alone."""
    monkeypatch.setattr("grpo_run.runtime.rank.resuming.snapshot_folder.LOCK_WAIT_SECONDS", 0.0)
    with held(full), pytest.raises(CheckpointError, match="being written"):
        OpenSnapshot(staging, name_of(full), threads=1)


def test_the_directory_of_a_killed_attempt_is_made_again(
    staging: StagingArea, full: StagingSlot, files: Path
) -> None:
    """A second kill during loading leaves files of any state behind."""
    first = OpenSnapshot(staging, name_of(full), threads=1)
    first.make_folder()
    (first.folder.path / "optimizer.pt").write_bytes(b"half")
    (first.folder.path / "trainer_state.json").unlink()
    first.close()  # as the kernel does when a rank is killed
    second = OpenSnapshot(staging, name_of(full), threads=1)
    second.make_folder()
    with serve_loads(second.folder):
        assert equal(load(second.checkpoint.path), load(files))
    second.close()
