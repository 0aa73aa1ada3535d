"""What is caught and what passes through, and that the libraries are as before afterwards."""

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

from grpo_run.runtime.errors import NoRoomError
from grpo_run.runtime.staging.buffer import SnapshotBuffer, SnapshotBufferReader
from grpo_run.runtime.staging.headroom import Headroom
from grpo_run.runtime.staging.writer import write_files
from grpo_run.trainers.capture import interception
from grpo_run.trainers.capture.interception import captured

STATE = {"weight": torch.arange(100.0)}


def wide(folder: Path) -> Headroom:
    """A limit that never binds."""
    return Headroom(name="a wide limit", free_bytes=1 << 40, total_bytes=1 << 40)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[SnapshotBuffer]:
    """An empty arena."""
    with SnapshotBuffer(tmp_path / "arena", measure=wide) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint's folder in the making."""
    made = tmp_path / "checkpoint-5"
    made.mkdir()
    return made


@pytest.fixture(autouse=True)
def _libraries_are_as_before() -> Iterator[None]:
    """After every test here, whatever happened in it."""
    before = (torch.save, torch.serialization.save, safetensors.torch.save_file)
    yield
    assert (torch.save, torch.serialization.save, safetensors.torch.save_file) == before


def test_what_lies_below_the_root_is_caught(arena: SnapshotBuffer, root: Path, tmp_path: Path) -> None:
    """By any of the libraries' names, into the arena and not to the folder; materialized it is the same."""
    (root / "sub").mkdir()
    with captured(arena, root) as image:
        torch.save(STATE, root / "optimizer.pt")
        torch.serialization.save(STATE, f=str(root / "sub/scheduler.pt"))
        safetensors.torch.save_file(STATE, str(root / "model.safetensors"), metadata={"format": "pt"})
    assert image.paths == ["optimizer.pt", "sub/scheduler.pt", "model.safetensors"]
    assert [path.name for path in root.rglob("*")] == ["sub"]
    with SnapshotBufferReader(arena.path) as reader:
        write_files(image, reader, root)
    (tmp_path / "direct").mkdir()
    torch.save(STATE, tmp_path / "direct/optimizer.pt")
    safetensors.torch.save_file(STATE, tmp_path / "direct/model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "model.safetensors"):
        assert (root / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_what_lies_elsewhere_passes_through(
    arena: SnapshotBuffer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the root, in a folder of a longer name, through dots and links, in files opened by the caller."""
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
    buffer = io.BytesIO()
    with captured(arena, root) as image:
        for target in targets:
            torch.save(STATE, target)
        torch.save(STATE, buffer)
        with open(root / "opened.pt", "wb") as file:
            torch.save(STATE, file)
        safetensors.torch.save_file(STATE, tmp_path / "beside.safetensors")
    assert image.files == []
    assert all(target.stat().st_size for target in [*targets, tmp_path / "linked.pt", root / "opened.pt"])
    assert buffer.tell()
    assert (tmp_path / "beside.safetensors").stat().st_size


def test_a_relative_path_is_caught(
    arena: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output directory is often given so; a link to the root is the root."""
    monkeypatch.chdir(root.parent)
    (root.parent / "latest").symlink_to(root.name)
    with captured(arena, Path(root.name)) as image:
        torch.save(STATE, "checkpoint-5/a.pt")
        torch.save(STATE, "./latest/../latest/b.pt")
    assert image.paths == ["a.pt", "b.pt"]


def test_a_chosen_pickle_or_format_passes_through(arena: SnapshotBuffer, root: Path) -> None:
    """They are the caller's own."""
    other = ModuleType("other_pickle")
    vars(other).update(vars(pickle))
    with captured(arena, root) as image:
        torch.save(STATE, root / "old.pt", _use_new_zipfile_serialization=False)
        torch.save(STATE, root / "other.pt", other)
    assert image.files == []
    assert torch.load(root / "old.pt", weights_only=True)["weight"][99] == 99
    assert torch.load(root / "other.pt", weights_only=True)["weight"][99] == 99


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_put_down_exactly_is_written_by_the_library(arena: SnapshotBuffer, root: Path) -> None:
    """Into the folder, where it is found with the other files."""
    with captured(arena, root) as image:
        torch.save(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), root / "quantized.pt")
        safetensors.torch.save_file(
            {"packed": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, root / "packed.safetensors"
        )
    assert image.files == []
    assert sorted(path.name for path in root.iterdir()) == ["packed.safetensors", "quantized.pt"]


def failing(call: Any) -> tuple[type[BaseException], str]:
    """How a call fails."""
    with pytest.raises(Exception) as failure:  # noqa: PT011 - which one is the question
        call()
    return failure.type, str(failure.value)


class Unpicklable:
    """As a lock or a socket would be."""

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
def test_a_failure_is_the_librarys_own(arena: SnapshotBuffer, root: Path, save: Any) -> None:
    """Kind and words; what was caught before is untouched, and what comes after is caught."""
    expected = failing(lambda: save(root))
    with captured(arena, root) as image:
        torch.save(STATE, root / "before.pt")
        assert failing(lambda: save(root)) == expected
        torch.save(STATE, root / "after.pt")
    assert image.paths == ["before.pt", "after.pt"]
    with SnapshotBufferReader(arena.path) as reader:
        for path in write_files(image, reader, root):
            assert torch.equal(torch.load(path, weights_only=True)["weight"], STATE["weight"])


def test_what_leaves_the_block_restores_the_libraries(arena: SnapshotBuffer, root: Path) -> None:
    """Also a stop of the whole script; the image keeps what was complete."""
    original = torch.save
    try:
        with captured(arena, root) as image:
            assert torch.save is not original
            torch.save(STATE, root / "a.pt")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert torch.save is original
    assert image.paths == ["a.pt"]
    torch.save(STATE, root / "b.pt")
    assert (root / "b.pt").exists()


def test_another_threads_saves_pass_through(arena: SnapshotBuffer, root: Path) -> None:
    """Even below the root: nobody knows whether they belong to the checkpoint."""

    def save() -> None:
        torch.save(STATE, root / "other.pt")
        safetensors.torch.save_file(STATE, root / "other.safetensors")

    with captured(arena, root) as image:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(30)
        torch.save(STATE, root / "own.pt")
    assert image.paths == ["own.pt"]
    assert sorted(path.name for path in root.iterdir()) == ["other.pt", "other.safetensors"]


def test_two_threads_may_capture_at_once(arena: SnapshotBuffer, root: Path, tmp_path: Path) -> None:
    """Each its own; the libraries are restored by the last, whichever began first."""
    original = torch.save
    entered, leave = threading.Event(), threading.Event()
    found: list[list[str]] = []
    (tmp_path / "second").mkdir()

    def second() -> None:
        with (
            SnapshotBuffer(tmp_path / "second.arena", measure=wide) as own,
            captured(own, tmp_path / "second") as image,
        ):
            entered.set()
            leave.wait(30)
            torch.save(STATE, tmp_path / "second/b.pt")
            found.append(image.paths)

    thread = threading.Thread(target=second)
    with captured(arena, root) as image:
        thread.start()
        assert entered.wait(30)
        torch.save(STATE, root / "a.pt")
    assert torch.save is not original
    leave.set()
    thread.join(30)
    assert torch.save is original
    assert (image.paths, found) == (["a.pt"], [["b.pt"]])


def test_names_that_modules_keep_are_replaced_and_restored(
    arena: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT, accelerate and transformers each hold `save_file` under a name of their own."""
    holder: Any = ModuleType("peft.peft_model")
    holder.safe_save_file = kept = safetensors.torch.save_file
    monkeypatch.setitem(sys.modules, "peft.peft_model", holder)
    with captured(arena, root) as image:
        holder.safe_save_file(STATE, root / "adapter_model.safetensors")
    assert image.paths == ["adapter_model.safetensors"]
    assert holder.safe_save_file is kept


def test_a_name_taken_meanwhile_goes_on_working(arena: SnapshotBuffer, root: Path) -> None:
    """A module that is first imported during a checkpoint keeps the replacement for ever."""
    with captured(arena, root):
        from torch import save
    save(STATE, root / "later.pt")
    assert torch.load(root / "later.pt", weights_only=True)["weight"][99] == 99
    with captured(arena, root) as image:
        save(STATE, root / "again.pt")
    assert image.paths == ["again.pt"]


def test_a_replacement_made_meanwhile_is_left(
    arena: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's patch is not ours to take away."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torch.save)  # put back at the end
        with captured(arena, root):
            torch.save = lambda *args, **kwargs: calls.append("theirs")
        torch.save(STATE, root / "x.pt")
    assert calls == ["theirs"]


def test_the_last_save_of_a_path_counts(arena: SnapshotBuffer, root: Path) -> None:
    """Whether caught or not: a file is in the image or in the folder, never in both."""
    (root / "stale.pt").write_bytes(b"of an earlier attempt")
    with captured(arena, root) as image:
        torch.save(STATE, root / "stale.pt")
        torch.save(STATE, root / "x.pt")
        torch.save(STATE, root / "x.pt", _use_new_zipfile_serialization=False)
        torch.save([1], root / "y.pt", _use_new_zipfile_serialization=False)
        torch.save([2], root / "y.pt")
    assert image.paths == ["stale.pt", "y.pt"]
    assert [path.name for path in root.iterdir()] == ["x.pt"]


def test_no_room_is_raised_at_the_end(tmp_path: Path, root: Path) -> None:
    """The save goes on to its end, for the sake of ranks that wait in it; what was caught before stays whole."""
    small = Headroom(name="a small limit", free_bytes=(64 << 20) + (4 << 20), total_bytes=100 << 20)

    def save_all() -> str:
        torch.save(STATE, root / "fits.pt")
        torch.save(torch.zeros(4 << 20), root / "does not.pt")
        torch.save(STATE, root / "would fit.pt")
        return "to the end"

    reached = None
    with SnapshotBuffer(tmp_path / "small", measure=lambda folder: small) as arena:
        with pytest.raises(NoRoomError, match="a small limit"), captured(arena, root) as image:
            reached = save_all()
        assert image.paths == ["fits.pt"]
    assert reached == "to the end"
    assert list(root.iterdir()) == []


def test_a_full_file_system_is_no_room(
    arena: SnapshotBuffer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the reservation, before any byte is copied."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoomError, match="No space left"), captured(arena, root) as image:
        torch.save(STATE, root / "x.pt")
    assert image.files == []


def test_one_thread_captures_once_at_a_time(arena: SnapshotBuffer, root: Path) -> None:
    """A checkpoint inside of a checkpoint is an error of ours; the outer one goes on."""
    with captured(arena, root) as image:
        with pytest.raises(AssertionError, match="one checkpoint at a time"), captured(arena, root):
            pass
        torch.save(STATE, root / "x.pt")
    assert image.paths == ["x.pt"]
    assert interception._current() is None


def test_the_replacements_look_like_the_originals(arena: SnapshotBuffer, root: Path) -> None:
    """Some ask for a function's signature before they call it."""
    import inspect

    names = (torch.save.__name__, inspect.signature(torch.save), torch.save.__doc__)
    with captured(arena, root):
        assert (torch.save.__name__, inspect.signature(torch.save), torch.save.__doc__) == names
