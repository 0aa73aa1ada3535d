"""Saves below a folder are written over spare files, others pass through, and the libraries are restored."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving import _spare_files as spare_files
from grpo_run.runtime.rank.saving._spare_files import allocate, reuse_files
from grpo_run.runtime.snapshots.headroom import Headroom

STATE = {"weight": torch.arange(1000.0)}
BASE = torch.arange(60.0)
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a checkpoint that is being saved."""
    made = tmp_path / "checkpoint-5"
    made.mkdir()
    return made


@pytest.fixture
def spare(tmp_path: Path) -> Path:
    """Spare files, larger and smaller than those that are saved."""
    made = tmp_path / "spare"
    made.mkdir()
    for name, size_bytes in (("optimizer.pt", 100_000), ("model.safetensors", 10)):
        (made / name).write_bytes(b"\xee" * size_bytes)
    return made


@pytest.fixture(autouse=True)
def _libraries_are_restored() -> Iterator[None]:
    """Check after every test that the save functions are the original ones."""
    before = (torch.save, torch.serialization.save, safetensors.torch.save_file)
    yield
    assert (torch.save, torch.serialization.save, safetensors.torch.save_file) == before


def test_files_are_written_over_spare_ones(folder: Path, spare: Path) -> None:
    """They are the same files, have the size of what is saved last, and hold it."""
    inodes = {path.name: path.stat().st_ino for path in spare.iterdir()}
    with reuse_files(folder, spare):
        torch.save({"weight": torch.ones(100_000)}, folder / "optimizer.pt")
        torch.save(STATE, folder / "optimizer.pt")
        torch.serialization.save(STATE, f=str(folder / "new.pt"))
        safetensors.torch.save_file(STATE, str(folder / "model.safetensors"), metadata={"format": "pt"})
        assert os.listdir(spare) == []
    assert {name: (folder / name).stat().st_ino for name in inodes} == inodes
    assert (folder / "optimizer.pt").stat().st_size < 100_000
    for name in ("optimizer.pt", "new.pt"):
        assert torch.equal(torch.load(folder / name)["weight"], STATE["weight"])
    written = (folder / "model.safetensors").read_bytes()
    assert written == safetensors.torch.save(STATE, metadata={"format": "pt"})


def test_a_spare_file_of_another_folder_is_used_if_it_has_the_name(folder: Path, spare: Path) -> None:
    """DeepSpeed writes into a folder that is named after the step."""
    (spare / "global_step5").mkdir()
    (spare / "optimizer.pt").rename(spare / "global_step5/rank0.pt")
    inode = (spare / "global_step5/rank0.pt").stat().st_ino
    (folder / "global_step6").mkdir()
    with reuse_files(folder, spare):
        torch.save(STATE, folder / "global_step6/rank0.pt")
    assert (folder / "global_step6/rank0.pt").stat().st_ino == inode


def test_any_object_and_format_of_torch_is_written(folder: Path, spare: Path) -> None:
    """Torch's own save runs, with the script's arguments."""
    tied = torch.ones(4)
    state = {"tied": tied, "view": tied[1:3], "empty": torch.empty(0), "text": "x", "half": tied.bfloat16()}
    with reuse_files(folder, spare):
        torch.save(state, folder / "optimizer.pt")
        torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(AttributeError, match="local object"):
            torch.save(lambda: None, folder / "broken.pt")
    for name in ("optimizer.pt", "old.pt"):
        loaded = torch.load(folder / name)
        assert loaded["text"] == "x"
        assert torch.equal(loaded["half"], state["half"])
        loaded["tied"][1] = 7
        assert loaded["view"][0] == 7


def test_saves_elsewhere_pass_through(folder: Path, spare: Path, tmp_path: Path) -> None:
    """Siblings, longer names, paths with dots, links and open files are not below the folder."""
    (tmp_path / "checkpoint-55").mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "optimizer.pt").symlink_to(tmp_path / "linked.pt")
    targets = [
        tmp_path / "optimizer.pt",
        tmp_path / "checkpoint-55/optimizer.pt",
        folder / "../model.safetensors",
        folder / "out/through.pt",
        folder / "optimizer.pt",
    ]
    stream = io.BytesIO()
    with reuse_files(folder, spare):
        for target in targets:
            torch.save(STATE, target)
        torch.save(STATE, stream)
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save(STATE, folder / "missing/optimizer.pt")
    assert all(target.stat().st_size for target in [*targets, tmp_path / "linked.pt"])
    assert stream.tell()
    assert len(os.listdir(spare)) == 2


def test_a_relative_path_is_recognized(folder: Path, spare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts often use a relative output directory; a link to the folder is the folder."""
    monkeypatch.chdir(folder.parent)
    (folder.parent / "latest").symlink_to(folder.name)
    with reuse_files(Path(folder.name), spare):
        torch.save(STATE, "./latest/../latest/optimizer.pt")
    assert not (spare / "optimizer.pt").exists()


def test_other_threads_and_modules_imported_meanwhile_pass_through(folder: Path, spare: Path) -> None:
    """A logger may save in the background. A module keeps the replacement, which calls the original after the
    block.
    """
    module = ModuleType("imported_meanwhile")
    with reuse_files(folder, spare):
        thread = threading.Thread(target=torch.save, args=(STATE, folder / "optimizer.pt"))
        thread.start()
        thread.join()
        module.save = torch.save  # type: ignore[attr-defined]
    assert (folder / "optimizer.pt").exists()
    module.save(STATE, folder / "optimizer.pt")
    assert (spare / "optimizer.pt").exists()
    assert torch.equal(torch.load(folder / "optimizer.pt")["weight"], STATE["weight"])


def test_a_function_that_the_script_has_replaced_is_called(
    folder: Path, spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its effects are not known."""
    called: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda obj, f: called.append(f))
        with reuse_files(folder, spare):
            torch.save(STATE, folder / "optimizer.pt")
    assert called == [folder / "optimizer.pt"]


def test_without_headroom_the_save_runs_to_its_end(
    folder: Path, spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may wait in a collective of the same save. Spare files need no headroom."""
    full = Headroom(name="a full limit", free_bytes=0, total_bytes=1 << 30)
    monkeypatch.setattr(spare_files, "least_headroom", lambda folder: full)
    reached = []

    def save() -> None:
        with reuse_files(folder, spare):
            torch.save(STATE, folder / "optimizer.pt")
            torch.save(STATE, folder / "new.pt")
            safetensors.torch.save_file(STATE, folder / "model.safetensors")
            reached.append(True)

    with pytest.raises(NoHeadroomError, match="a full limit has"):
        save()
    assert reached
    assert torch.equal(torch.load(folder / "optimizer.pt")["weight"], STATE["weight"])


def test_a_full_file_system_ends_the_block_with_its_error(
    folder: Path, spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's writer is not left in the middle of an archive."""

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="full"), reuse_files(folder, spare):
        torch.save(STATE, folder / "optimizer.pt")


def test_memory_is_allocated_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has its pages; without headroom it does not exist."""
    allocate(tmp_path / "spare/optimizer.pt", 3 << 20)
    assert (tmp_path / "spare/optimizer.pt").stat().st_blocks * 512 >= 3 << 20
    full = Headroom(name="a full limit", free_bytes=0, total_bytes=1 << 30)
    monkeypatch.setattr(spare_files, "least_headroom", lambda folder: full)
    with pytest.raises(NoHeadroomError):
        allocate(tmp_path / "spare/other.pt", 3 << 20)
    assert not (tmp_path / "spare/other.pt").exists()


WEIGHTS = {
    "scalar": {"scalar": torch.tensor(1.5), "empty": torch.empty(0), "shaped": torch.ones(2, 3)},
    "names": {'a"b\\': torch.ones(1), "ä": torch.ones(2), "\U0001f600": torch.ones(3), "": torch.ones(1)},
    "types": {
        f"{name}.{dtype}": torch.arange(size * 8, dtype=torch.uint8).view(torch.uint8)[: size * 8].to(dtype)
        if dtype != torch.bool
        else torch.ones(size, dtype=torch.bool)
        for dtype in DTYPES
        for name, size in (("b", 1), ("a", 7))
    },
    "views": {"view": BASE[10:20], "parameter": torch.nn.Parameter(torch.ones(3))},
    "large": {"large": torch.arange(6_000_000), "small": torch.ones(1)},
}


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        *((kind, None) for kind in WEIGHTS),
        *(("scalar", metadata) for metadata in ({}, {"format": "pt"}, {'né"': "\n"})),
    ],
)
def test_weights_are_written_as_safetensors_writes_them(
    folder: Path, spare: Path, kind: str, metadata: dict[str, str] | None
) -> None:
    """Order, padding and escapes are equal."""
    tensors = WEIGHTS[kind]
    with reuse_files(folder, spare):
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata)
    assert not (spare / "model.safetensors").exists()
    assert (folder / "model.safetensors").read_bytes() == safetensors.torch.save(tensors, metadata)


def freed() -> torch.Tensor:
    """Return a tensor whose storage was freed, as sharding does."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, None),
        ({"turned": torch.ones(2, 3).t()}, None),
        ({"one": BASE, "other": BASE}, None),
        ({"freed": freed()}, None),
        ({"sparse": torch.eye(3).to_sparse()}, None),
        ({"meta": torch.empty(3, device="meta")}, None),
        ({"conjugate": torch.ones(2, dtype=torch.complex64).conj()}, None),
        ({"wide": torch.ones(2, dtype=torch.complex128)}, None),
        ({"text": "no tensor"}, None),
        ({1: torch.ones(1)}, None),
        ({"\ud800": torch.ones(1)}, None),
        ({"__metadata__": torch.ones(1)}, None),
        ({"weight": torch.ones(1)}, {"number": 1}),
        ({"weight": torch.ones(1)}, "text"),
        (None, None),
    ],
    ids=lambda value: None,
)
def test_tensors_that_safetensors_must_write_are_left_to_it(
    folder: Path, spare: Path, tensors: Any, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors raises its own error or writes another format; the spare file stays."""
    called: list[Any] = []

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        called.append(tensors)

    save_file.__module__ = "safetensors.torch"
    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    with reuse_files(folder, spare):
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata)
    assert called == [tensors] or called[0] is tensors
    assert (spare / "model.safetensors").exists()
    monkeypatch.undo()
