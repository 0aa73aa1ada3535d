"""Replace the save functions of torch and safetensors, so that a save writes into a snapshot buffer.

`capture_saves` is used by `snapshots.py` around the trainer's own checkpoint method. It affects the calling thread and files
below the given directory only. Other saves pass through unchanged, and so do objects that cannot be captured
exactly. A captured file does not exist until `runtime.snapshots.writer` writes it. Copies no bytes
(`packing.py`), and does not decide where a checkpoint goes.
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

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving import packing
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer
from grpo_run.runtime.snapshots.index import SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.runtime.upstream import tensor_files


@dataclass(kw_only=True)
class _Capture:
    """The capture of one thread."""

    buffer: SnapshotBuffer
    root: str
    index: SnapshotIndex
    threads: int
    failure: NoHeadroomError | None = None

    def relative_path(self, target: Any) -> str | None:
        """Return the target as a POSIX path below the root, or None if no file can be created there."""
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
            return None  # the library raises its own error, or follows the link
        try:
            path.encode()
        except UnicodeEncodeError:
            return None  # the index is JSON, which cannot hold this name
        return os.path.relpath(path, self.root)

    def save(self, target: Any, pack: Callable[[str], TorchFile | SafetensorsFile | None]) -> bool:
        """Save the file of `target` into the buffer. Return False if the library must write it."""
        path = self.relative_path(target)
        if path is None:
            return False
        if self.failure is not None:
            return True
        try:
            file = pack(path)
        except NoHeadroomError as error:
            # the save continues to its end, because other ranks may wait in a collective of it
            self.failure = error
            return True
        if file is None:
            self.index.drop(path)  # the library overwrites what was captured before
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, path))
        self.index.put(file)
        return True


_Pack = Callable[[_Capture, str, Mapping[str, Any]], TorchFile | SafetensorsFile | None]

_thread = threading.local()
"""`capture` is the capture of the current thread."""


def _current() -> _Capture | None:
    return getattr(_thread, "capture", None)


@contextlib.contextmanager
def capture_saves(buffer: SnapshotBuffer, root: Path, *, threads: int = 1) -> Iterator[SnapshotIndex]:
    """Capture what this thread saves below `root`.

    Yields the index, which is complete when the block ends. Appends to the buffer: call `buffer.begin()`
    first to reuse its memory. If the buffer cannot grow, nothing more is captured, but the block runs to its
    end, because other ranks may wait in collectives of the same save.

    Args:
        root: an existing directory.
        threads: maximum number of copying threads.

    Raises:
        NoHeadroomError: at the end of the block, if the buffer could not grow; the index is incomplete.
    """
    assert _current() is None, "a thread captures one checkpoint at a time"
    index = SnapshotIndex()
    with _replacements.installed():
        capture = _thread.capture = _Capture(
            buffer=buffer, root=os.path.realpath(root), index=index, threads=threads
        )
        try:
            yield index
        finally:
            del _thread.capture
    if capture.failure is not None:
        raise capture.failure


def _capturing(original: Callable[..., Any], target_argument: str, pack: _Pack) -> Callable[..., Any]:
    """Wrap a library's save function so that it captures.

    Args:
        target_argument: name of its argument that holds the path.
        pack: saves the arguments into the capture's buffer; returns None if the library must write the file.
    """
    # a script may have replaced the function, with other arguments or with effects of its own
    own = tensor_files.is_library_function(original)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        capture = _current() if own else None
        if capture is not None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            if capture.save(arguments[target_argument], lambda path: pack(capture, path, arguments)):
                return None
        return original(*args, **kwargs)

    return save


def _pack_torch(capture: _Capture, path: str, arguments: Mapping[str, Any]) -> TorchFile | None:
    """Pack a `torch.save` call that uses Python's pickle and the zip format."""
    if arguments["pickle_module"] is not pickle or not arguments["_use_new_zipfile_serialization"]:
        return None
    return packing.pack_torch(
        capture.buffer,
        path,
        arguments["obj"],
        protocol=arguments["pickle_protocol"],
        disable_byteorder_record=arguments["_disable_byteorder_record"],
        threads=capture.threads,
    )


def _pack_safetensors(capture: _Capture, path: str, arguments: Mapping[str, Any]) -> SafetensorsFile | None:
    return packing.pack_safetensors(
        capture.buffer, path, arguments["tensors"], arguments["metadata"], threads=capture.threads
    )


@dataclass
class _Replacements:
    """The replaced functions: installed by the first capture, restored by the last.

    A module that imports a replaced function keeps the replacement. Outside a capture, it calls the original.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    captures: int = 0
    replaced: list[tuple[ModuleType, str, Any, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
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
        # modules that are not imported have nothing to replace, and importing them takes seconds
        for names, replacement in (
            (tensor_files.TORCH_SAVE, _capturing(torch.save, "f", _pack_torch)),
            (
                tensor_files.SAFETENSORS_SAVE,
                _capturing(safetensors.torch.save_file, "filename", _pack_safetensors),
            ),
        ):
            for module_name, name in names:
                module = sys.modules.get(module_name)
                if module is not None and hasattr(module, name):
                    self.replaced.append((module, name, getattr(module, name), replacement))
                    setattr(module, name, replacement)

    def _restore(self) -> None:
        for module, name, original, replacement in reversed(self.replaced):
            if getattr(module, name) is replacement:  # else other code has replaced it since
                setattr(module, name, original)
        self.replaced.clear()


_replacements = _Replacements()
