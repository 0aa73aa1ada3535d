"""While a checkpoint is taken, catches what torch and safetensors are about to write and puts it into an arena.

Called by the guard around a trainer's own checkpoint method, in the thread that saves; what other threads save and
what does not lie below the given root passes through untouched, and so does everything that cannot be put down
exactly. A file that was caught is not there until `grpo_run.runtime.staging.writer` writes it. Does not copy bytes
itself, nor decide where a checkpoint goes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch

from grpo_run.runtime.errors import NoRoomError
from grpo_run.runtime.staging.buffer import SnapshotBuffer
from grpo_run.runtime.staging.index import SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.trainers import upstream
from grpo_run.trainers.capture import packing


@dataclass(kw_only=True)
class _Capture:
    arena: SnapshotBuffer
    root: str
    image: SnapshotIndex
    threads: int
    failure: NoRoomError | None = None

    def relative(self, target: Any) -> str | None:
        """The target's path below the root as POSIX; None when it is not a file that may be made there."""
        if not isinstance(target, (str, os.PathLike)):
            return None
        name = os.fspath(target)
        if not isinstance(name, str):
            return None
        folder, file = os.path.split(os.path.abspath(name))
        path = os.path.join(os.path.realpath(folder), file)
        if not path.startswith(self.root + os.sep):
            return None
        if not os.path.isdir(folder) or os.path.islink(path) or os.path.isdir(path):
            return None  # the library says what is wrong, or follows the link
        try:
            path.encode()
        except UnicodeEncodeError:
            return None  # no text: JSON could not hold it
        return os.path.relpath(path, self.root)

    def catch(self, target: Any, pack: Callable[[str], TorchFile | SafetensorsFile | None]) -> bool:
        """Put the file of `target` into the arena; whether it is there now."""
        path = self.relative(target)
        if path is None:
            return False
        if self.failure is not None:
            return True
        try:
            file = pack(path)
        except NoRoomError as error:
            # other ranks may be on their way into a collective of this save: it is gone through to its end
            self.failure = error
            return True
        if file is None:
            self.image.drop(path)  # the library writes over what was caught before
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, path))
        self.image.put(file)
        return True


_Pack = Callable[[_Capture, str, Mapping[str, Any]], TorchFile | SafetensorsFile | None]

_thread = threading.local()
"""`capture`: the capture of this thread."""


def _current() -> _Capture | None:
    return getattr(_thread, "capture", None)


@contextlib.contextmanager
def captured(arena: SnapshotBuffer, root: Path, *, threads: int = 1) -> Iterator[SnapshotIndex]:
    """Catch what this thread saves below `root`; yields the image, complete when the block has ended.

    Appends to the arena: call `arena.begin()` first to use its space again. After a save that finds no room nothing more is
    put down; the block still runs to its end, as collectives in it are waited for by other ranks.

    Args:
        root: a folder that exists.
        threads: to copy with.

    Raises:
        NoRoomError: at the block's end; the image is not whole.
    """
    assert _current() is None, "a thread captures one checkpoint at a time"
    image = SnapshotIndex()
    with _installation.held():
        capture = _thread.capture = _Capture(
            arena=arena, root=os.path.realpath(root), image=image, threads=threads
        )
        try:
            yield image
        finally:
            del _thread.capture
    if capture.failure is not None:
        raise capture.failure


def _catching(original: Callable[..., Any], target_argument_name: str, pack: _Pack) -> Callable[..., Any]:
    """A library's function that writes a file, catching.

    Args:
        target_argument_name: of its argument that says where to.
        pack: puts what it was given into the capture's arena; None when the library had better write it.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        capture = _current()
        if capture is not None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if capture.catch(given[target_argument_name], lambda path: pack(capture, path, given)):
                return None
        return original(*args, **kwargs)

    return save


def _pack_torch(capture: _Capture, path: str, given: Mapping[str, Any]) -> TorchFile | None:
    """The archive, when it is one of torch's own format pickled by Python's own pickle."""
    if given["pickle_module"] is not pickle or not given["_use_new_zipfile_serialization"]:
        return None
    return packing.pack_torch(
        capture.arena,
        path,
        given["obj"],
        protocol=given["pickle_protocol"],
        disable_byteorder_record=given["_disable_byteorder_record"],
        threads=capture.threads,
    )


def _pack_safetensors(capture: _Capture, path: str, given: Mapping[str, Any]) -> SafetensorsFile | None:
    return packing.pack_safetensors(
        capture.arena, path, given["tensors"], given["metadata"], threads=capture.threads
    )


@dataclass
class _Installation:
    """The replaced functions: put in by the first capture, taken out by the last.

    Who takes a name from a library while it is replaced keeps the replacement, which passes everything
    through when its thread captures nothing.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    captures: int = 0
    replaced: list[tuple[ModuleType, str, Any, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self.lock:
            if self.captures == 0:
                self._install()
            self.captures += 1
        try:
            yield
        finally:
            with self.lock:
                self.captures -= 1
                if self.captures == 0:
                    self._restore()

    def _install(self) -> None:
        # modules that are not imported have nothing to replace, and importing them here would take seconds
        for names, replacement in (
            (upstream.TORCH_SAVE, _catching(torch.save, "f", _pack_torch)),
            (
                upstream.SAFETENSORS_SAVE,
                _catching(safetensors.torch.save_file, "filename", _pack_safetensors),
            ),
        ):
            for module_name, name in names:
                module = sys.modules.get(module_name)
                if module is not None and hasattr(module, name):
                    self.replaced.append((module, name, getattr(module, name), replacement))
                    setattr(module, name, replacement)

    def _restore(self) -> None:
        for module, name, original, replacement in reversed(self.replaced):
            if getattr(module, name) is replacement:  # else someone has replaced it since, and means it
                setattr(module, name, original)
        self.replaced.clear()


_installation = _Installation()
