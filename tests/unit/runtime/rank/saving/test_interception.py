"""Saves below the root are captured, others pass through, and the libraries are restored afterwards."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving.interception import capture_saves
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer, SnapshotBufferReader
from grpo_run.runtime.snapshots.headroom import Headroom
from grpo_run.runtime.snapshots.writer import write_files

STATE = {"weight": torch.arange(100.0)}


def wide(folder: Path) -> Headroom:
    """Return a limit that is never reached."""
    return Headroom(name="a wide limit", free_bytes=1 << 40, total_bytes=1 << 40)


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[SnapshotBuffer]:
    """An empty buffer."""
    with SnapshotBuffer(tmp_path / "buffer", measure=wide) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a checkpoint that is being saved."""
    made = tmp_path / "checkpoint-5"
    made.mkdir()
    return made


@pytest.fixture(autouse=True)
def _libraries_are_restored() -> Iterator[None]:
    """Check after every test that the save functions are the original ones."""
    before = (torch.save, torch.serialization.save, safetensors.torch.save_file)
    yield
    assert (torch.save, torch.serialization.save, safetensors.torch.save_file) == before


def test_saves_below_the_root_are_captured(buffer: SnapshotBuffer, root: Path, tmp_path: Path) -> None:
    """They go to the buffer, not to the directory, and are written later with the same bytes."""
    (root / "sub").mkdir()
    with capture_saves(buffer, root) as index:
        torch.save(STATE, root / "optimizer.pt")
        torch.serialization.save(STATE, f=str(root / "sub/scheduler.pt"))
        safetensors.torch.save_file(STATE, str(root / "model.safetensors"), metadata={"format": "pt"})
    assert index.paths == ["optimizer.pt", "sub/scheduler.pt", "model.safetensors"]
    assert [path.name for path in root.rglob("*")] == ["sub"]
    with SnapshotBufferReader(buffer.path) as reader:
        write_files(index, reader, root)
    (tmp_path / "direct").mkdir()
    torch.save(STATE, tmp_path / "direct/optimizer.pt")
    safetensors.torch.save_file(STATE, tmp_path / "direct/model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "model.safetensors"):
        assert (root / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_saves_elsewhere_pass_through(
    buffer: SnapshotBuffer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings, longer names, paths with dots, links and open files are not below the root."""
    (tmp_path / "checkpoint-55").mkdir()
    (root / "out").symlink_to(tmp_path)
    (root / "link.pt").symlink_to(tmp_path / "linked.pt")
    targets = [
        tmp_path / "beside.pt",
        tmp_path / "checkpoint-55/longer.pt",
        root / "../dots.pt",
        root / "out/through.pt",
        root / "link.pt",
    ]
    stream = io.BytesIO()
    with capture_saves(buffer, root) as index:
        for target in targets:
            torch.save(STATE, target)
        torch.save(STATE, stream)
        with open(root / "opened.pt", "wb") as file:
            torch.save(STATE, file)
        safetensors.torch.save_file(STATE, tmp_path / "beside.safetensors")
    assert index.files == []
    assert all(target.stat().st_size for target in [*targets, tmp_path / "linked.pt", root / "opened.pt"])
    assert stream.tell()
    assert (tmp_path / "beside.safetensors").stat().st_size


def test_a_relative_path_is_captured(
    buffer: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts often use a relative output directory; a link to the root is the root."""
    monkeypatch.chdir(root.parent)
    (root.parent / "latest").symlink_to(root.name)
    with capture_saves(buffer, Path(root.name)) as index:
        torch.save(STATE, "checkpoint-5/a.pt")
        torch.save(STATE, "./latest/../latest/b.pt")
    assert index.paths == ["a.pt", "b.pt"]


def test_another_pickle_module_or_format_passes_through(buffer: SnapshotBuffer, root: Path) -> None:
    """Only Python's pickle and the zip format are captured."""
    other = ModuleType("other_pickle")
    vars(other).update(vars(pickle))
    with capture_saves(buffer, root) as index:
        torch.save(STATE, root / "old.pt", _use_new_zipfile_serialization=False)
        torch.save(STATE, root / "other.pt", other)
    assert index.files == []
    assert torch.load(root / "old.pt", weights_only=True)["weight"][99] == 99
    assert torch.load(root / "other.pt", weights_only=True)["weight"][99] == 99


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_object_that_cannot_be_captured_exactly_is_written_by_the_library(
    buffer: SnapshotBuffer, root: Path
) -> None:
    """The library writes it into the directory of the checkpoint."""
    with capture_saves(buffer, root) as index:
        torch.save(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), root / "quantized.pt")
        safetensors.torch.save_file(
            {"packed": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, root / "packed.safetensors"
        )
    assert index.files == []
    assert sorted(path.name for path in root.iterdir()) == ["packed.safetensors", "quantized.pt"]


def failing(call: Any) -> tuple[type[BaseException], str]:
    """Return the type and message of the error that a call raises."""
    with pytest.raises(Exception) as failure:  # noqa: PT011 - the type is the result
        call()
    return failure.type, str(failure.value)


class Unpicklable:
    """An object that cannot be pickled, like a lock or a socket."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: torch.save([torch.ones(3), Unpicklable()], folder / "x.pt"),
        lambda folder: torch.save(lambda: None, folder / "x.pt"),
        lambda folder: torch.save(STATE, "no/such/folder/x.pt"),
        lambda folder: torch.save(),
        lambda folder: torch.save(STATE, folder / "x.pt", surplus=1),
        lambda folder: torch.save(STATE, 5),
        lambda folder: safetensors.torch.save_file({"t": torch.ones(2, 3).t()}, folder / "x.safetensors"),
        lambda folder: safetensors.torch.save_file(
            {"a": STATE["weight"], "b": STATE["weight"]}, folder / "x"
        ),
        lambda folder: safetensors.torch.save_file({"s": torch.eye(3).to_sparse()}, folder / "x.safetensors"),
        lambda folder: safetensors.torch.save_file({"t": "text"}, folder / "x.safetensors"),
        lambda folder: safetensors.torch.save_file(STATE, folder / "x.safetensors", {"number": 1}),
        lambda folder: safetensors.torch.save_file(STATE),
    ],
    ids=lambda value: None,
)
def test_an_error_of_the_library_is_unchanged(buffer: SnapshotBuffer, root: Path, save: Any) -> None:
    """Type and message are equal; earlier and later saves are captured."""
    expected = failing(lambda: save(root))
    with capture_saves(buffer, root) as index:
        torch.save(STATE, root / "before.pt")
        assert failing(lambda: save(root)) == expected
        torch.save(STATE, root / "after.pt")
    assert index.paths == ["before.pt", "after.pt"]
    with SnapshotBufferReader(buffer.path) as reader:
        for path in write_files(index, reader, root):
            assert torch.equal(torch.load(path, weights_only=True)["weight"], STATE["weight"])


def test_an_exception_restores_the_libraries(buffer: SnapshotBuffer, root: Path) -> None:
    """Holds for KeyboardInterrupt too; the index keeps the completed files."""
    original = torch.save
    try:
        with capture_saves(buffer, root) as index:
            assert torch.save is not original
            torch.save(STATE, root / "a.pt")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert torch.save is original
    assert index.paths == ["a.pt"]
    torch.save(STATE, root / "b.pt")
    assert (root / "b.pt").exists()


def test_saves_of_another_thread_pass_through(buffer: SnapshotBuffer, root: Path) -> None:
    """They pass through even below the root, because they may not belong to the checkpoint."""

    def save() -> None:
        torch.save(STATE, root / "other.pt")
        safetensors.torch.save_file(STATE, root / "other.safetensors")

    with capture_saves(buffer, root) as index:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(30)
        torch.save(STATE, root / "own.pt")
    assert index.paths == ["own.pt"]
    assert sorted(path.name for path in root.iterdir()) == ["other.pt", "other.safetensors"]


def test_two_threads_can_capture_at_the_same_time(buffer: SnapshotBuffer, root: Path, tmp_path: Path) -> None:
    """Each captures its own saves; the last one to end restores the libraries."""
    original = torch.save
    entered, leave = threading.Event(), threading.Event()
    found: list[list[str]] = []
    (tmp_path / "second").mkdir()

    def second() -> None:
        with (
            SnapshotBuffer(tmp_path / "second.buffer", measure=wide) as own,
            capture_saves(own, tmp_path / "second") as index,
        ):
            entered.set()
            leave.wait(30)
            torch.save(STATE, tmp_path / "second/b.pt")
            found.append(index.paths)

    thread = threading.Thread(target=second)
    with capture_saves(buffer, root) as index:
        thread.start()
        assert entered.wait(30)
        torch.save(STATE, root / "a.pt")
    assert torch.save is not original
    leave.set()
    thread.join(30)
    assert torch.save is original
    assert (index.paths, found) == (["a.pt"], [["b.pt"]])


def test_references_in_other_modules_are_replaced_and_restored(
    buffer: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT, accelerate and transformers import `save_file` under their own names."""
    holder: Any = ModuleType("peft.peft_model")
    holder.safe_save_file = kept = safetensors.torch.save_file
    monkeypatch.setitem(sys.modules, "peft.peft_model", holder)
    with capture_saves(buffer, root) as index:
        holder.safe_save_file(STATE, root / "adapter_model.safetensors")
    assert index.paths == ["adapter_model.safetensors"]
    assert holder.safe_save_file is kept


def test_a_function_imported_during_a_capture_keeps_working(buffer: SnapshotBuffer, root: Path) -> None:
    """A module that is first imported during a capture keeps the replacement."""
    with capture_saves(buffer, root):
        from torch import save
    save(STATE, root / "later.pt")
    assert torch.load(root / "later.pt", weights_only=True)["weight"][99] == 99
    with capture_saves(buffer, root) as index:
        save(STATE, root / "again.pt")
    assert index.paths == ["again.pt"]


def test_a_replacement_by_other_code_is_kept(
    buffer: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch that other code installs during a capture is not removed."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torch.save)  # restored at the end
        with capture_saves(buffer, root):
            torch.save = lambda *args, **kwargs: calls.append("theirs")
        torch.save(STATE, root / "x.pt")
    assert calls == ["theirs"]


def test_the_last_save_of_a_path_wins(buffer: SnapshotBuffer, root: Path) -> None:
    """A file is either in the index or in the directory, never in both."""
    (root / "stale.pt").write_bytes(b"of an earlier attempt")
    with capture_saves(buffer, root) as index:
        torch.save(STATE, root / "stale.pt")
        torch.save(STATE, root / "x.pt")
        torch.save(STATE, root / "x.pt", _use_new_zipfile_serialization=False)
        torch.save([1], root / "y.pt", _use_new_zipfile_serialization=False)
        torch.save([2], root / "y.pt")
    assert index.paths == ["stale.pt", "y.pt"]
    assert [path.name for path in root.iterdir()] == ["x.pt"]


def test_lack_of_memory_is_raised_at_the_end_of_the_block(tmp_path: Path, root: Path) -> None:
    """The block runs to its end, because other ranks may wait in the save; earlier files stay complete."""
    small = Headroom(name="a small limit", free_bytes=(64 << 20) + (4 << 20), total_bytes=100 << 20)

    def save_all() -> str:
        torch.save(STATE, root / "fits.pt")
        torch.save(torch.zeros(4 << 20), root / "does not.pt")
        torch.save(STATE, root / "would fit.pt")
        return "to the end"

    reached = None
    with SnapshotBuffer(tmp_path / "small", measure=lambda folder: small) as buffer:
        with pytest.raises(NoHeadroomError, match="a small limit"), capture_saves(buffer, root) as index:
            reached = save_all()
        assert index.paths == ["fits.pt"]
    assert reached == "to the end"
    assert list(root.iterdir()) == []


def test_a_full_file_system_is_a_lack_of_memory(
    buffer: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is detected when memory is reserved, before any byte is copied."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoHeadroomError, match="No space left"), capture_saves(buffer, root) as index:
        torch.save(STATE, root / "x.pt")
    assert index.files == []


def test_captures_of_one_thread_cannot_be_nested(buffer: SnapshotBuffer, root: Path) -> None:
    """The inner capture fails an assertion; the outer one continues."""
    with capture_saves(buffer, root) as index:
        with pytest.raises(AssertionError, match="one checkpoint at a time"), capture_saves(buffer, root):
            pass
        torch.save(STATE, root / "x.pt")
    assert index.paths == ["x.pt"]
    with capture_saves(buffer, root) as later:
        torch.save(STATE, root / "y.pt")
    assert later.paths == ["y.pt"]


def test_the_replacements_have_the_signature_of_the_originals(buffer: SnapshotBuffer, root: Path) -> None:
    """Callers may inspect the signature, name and docstring."""
    import inspect

    names = (torch.save.__name__, inspect.signature(torch.save), torch.save.__doc__)
    with capture_saves(buffer, root):
        assert (torch.save.__name__, inspect.signature(torch.save), torch.save.__doc__) == names


def test_a_save_function_of_the_script_is_called(
    buffer: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts replace `torch.save`, for example to log it; its file is then not captured."""
    original, called = torch.save, []

    def save(*args: Any, **kwargs: Any) -> None:
        called.append(args[1])
        original(*args, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with capture_saves(buffer, root) as index:
        torch.save(STATE, root / "optimizer.pt")
    assert called == [root / "optimizer.pt"]
    assert index.paths == []
    assert (root / "optimizer.pt").stat().st_size
    monkeypatch.undo()
