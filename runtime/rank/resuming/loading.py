"""Replace the load functions of torch and safetensors, so that a trainer loads a checkpoint from memory.

`runtime/rank/step/resume.py` enters `serve_loads` around the trainer's own loading. Only files of the
directory that stands for the checkpoint are affected (`snapshot_folder.py`); large files are empty there. A
call that reads one as transformers does gets new tensors from the snapshot's buffer: every tensor has
memory of its own, because the next snapshot overwrites the buffer. For any other call the file is first
written, and the library reads it. Does not decide which checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import safetensors
import safetensors.torch
import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.resuming.snapshot_folder import MemoryPool, ServedFolder
from grpo_run.runtime.rank.saving.copying import copy_out
from grpo_run.runtime.snapshots.buffer import SnapshotBufferReader, aligned
from grpo_run.runtime.snapshots.index import SafetensorsFile, TorchFile
from grpo_run.runtime.upstream import tensor_files

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_TYPES = {
    name: getattr(torch, attribute)
    for attribute, name in tensor_files.SAFETENSORS_TYPES.items()
    if hasattr(torch, attribute)
}


def load_torch(
    file: TorchFile, buffer: SnapshotBufferReader, pool: MemoryPool, *, map_location: Any, threads: int = 1
) -> Any:
    """Return what `torch.load(..., weights_only=True)` would return for the file.

    Args:
        pool: provides the memory of the tensors.
        map_location: as of `torch.load`.
        threads: maximum number of copying threads.

    Raises:
        CheckpointError: a record is missing or outside the buffer. pickle.UnpicklingError: as `torch.load`.
    """
    pool.begin_file(sum(aligned(record.size) for record in file.records))
    return tensor_files.load_archive(_Archive(file, _Copier(buffer, pool, threads)), map_location)


class _Copier:
    """Copies parts of a buffer into new tensors."""

    def __init__(self, buffer: SnapshotBufferReader, pool: MemoryPool, threads: int) -> None:
        self.buffer = buffer
        self._pool = pool
        self._threads = threads

    def __call__(self, offset: int, size_bytes: int) -> torch.Tensor:
        tensor = self._pool.take(size_bytes)
        copy_out(self.buffer, offset, tensor, threads=self._threads)
        return tensor


class _Archive:
    """The part of torch's `PyTorchFileReader` that loading uses, for a file in a buffer."""

    def __init__(self, file: TorchFile, copied: _Copier) -> None:
        self._path = file.path
        self._records = {record.name: record for record in file.records}
        self._copied = copied

    def has_record(self, name: str) -> bool:
        return name in self._records

    def get_record(self, name: str) -> bytes:
        record = self._record(name)
        with self._copied.buffer.view(record.offset, record.size) as view:
            return bytes(view)

    def get_storage_from_record(self, name: str, size_bytes: int, storage_type: Any) -> torch.Tensor:
        record = self._record(name)
        if record.size != size_bytes:
            raise CheckpointError(f"{self._path}: {name} has {record.size} bytes instead of {size_bytes}")
        return self._copied(record.offset, size_bytes)

    def serialization_id(self) -> str:
        return ""  # torch only logs it

    def _record(self, name: str) -> Any:
        if name not in self._records:
            raise CheckpointError(f"{self._path} has no record {name}")
        return self._records[name]


def load_safetensors(
    file: SafetensorsFile, buffer: SnapshotBufferReader, pool: MemoryPool, *, device: Any, threads: int = 1
) -> dict[str, torch.Tensor]:
    """Return what safetensors' `load_file` would return for the file.

    Args:
        pool: provides the memory of the tensors.
        device: as of `load_file`.
        threads: maximum number of copying threads.

    Raises:
        CheckpointError: the file is not a complete safetensors file, or is outside the buffer.
    """
    (record,) = file.records
    loaded: dict[str, torch.Tensor] = {}
    copied = _Copier(buffer, pool, threads)
    try:
        with buffer.view(record.offset, min(LENGTH_BYTES, record.size)) as view:
            (length,) = struct.unpack("<Q", view)
        if length > record.size - LENGTH_BYTES:
            raise ValueError("its header is longer than the file")
        with buffer.view(record.offset + LENGTH_BYTES, length) as view:
            header = json.loads(bytes(view))
        data = record.offset + LENGTH_BYTES + length
        end = record.offset + record.size
        pool.begin_file(sum(aligned(_size_bytes(entry)) for entry in header.values()))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = (data + offset for offset in entry["data_offsets"])
            if not data <= first <= last <= end:
                raise ValueError(f"{name} lies outside the file")
            flat = copied(first, last - first)
            tensor = flat.view(_TYPES[entry["dtype"]]).view(entry["shape"])
            loaded[name] = tensor.to(device)
    except (ValueError, KeyError, TypeError, struct.error, RuntimeError) as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    return loaded


def _size_bytes(entry: dict[str, Any]) -> int:
    first, last = entry.get("data_offsets", (0, 0))  # the metadata has none
    return int(last) - int(first)


_Read = Callable[[ServedFolder, str, Mapping[str, Any]], Any]
NOT_SERVED = object()
"""Returned by a reader for arguments that it does not support."""


@contextlib.contextmanager
def serve_loads(folder: ServedFolder) -> Iterator[None]:
    """Within the block, serve the large files of a folder from memory.

    In all threads; one checkpoint at a time. A module that imports a replaced function meanwhile keeps the
    replacement, which afterwards calls the original.
    """
    replaced: list[tuple[ModuleType, str, Any, Any]] = []
    active = [folder]
    # modules that are not imported have nothing to replace, and importing them takes seconds
    for names, original, argument, read in (
        (tensor_files.TORCH_LOAD, torch.load, "f", _read_torch),
        (tensor_files.SAFETENSORS_LOAD, safetensors.torch.load_file, "filename", _read_safetensors),
        (tensor_files.SAFETENSORS_OPEN, safetensors.safe_open, None, _read_nothing),
    ):
        replacement = _serving(original, argument, read, active)
        for module_name, name in names:
            module = sys.modules.get(module_name)
            if module is not None and getattr(module, name, None) is original:
                replaced.append((module, name, original, replacement))
                setattr(module, name, replacement)
    try:
        yield
    finally:
        active.clear()
        for module, name, original, replacement in reversed(replaced):
            if getattr(module, name) is replacement:  # else other code has replaced it since
                setattr(module, name, original)


def _serving(
    original: Callable[..., Any], argument: str | None, read: _Read, active: list[ServedFolder]
) -> Callable[..., Any]:
    """Wrap a library's load function.

    Args:
        argument: name of its first argument, which holds the path; None if nothing can be served.
        read: returns the file's content for these arguments, or `NOT_SERVED`.
        active: the folder to serve; empty when nothing is served any more.
    """
    # a script may have replaced the function; then its own is called, with the file written
    own = tensor_files.is_library_function(original)
    signature = inspect.signature(original) if own and argument is not None else None

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get(argument or "filename")
        path = _relative_path(active[0], target) if active else None
        if path is not None:
            content = NOT_SERVED
            if signature is not None:
                try:
                    bound = signature.bind(*args, **kwargs)
                except TypeError:
                    return original(*args, **kwargs)
                bound.apply_defaults()
                content = read(active[0], path, bound.arguments)
            if content is not NOT_SERVED:
                return content
            active[0].write(path)
        return original(*args, **kwargs)

    return load


def _relative_path(folder: ServedFolder, target: Any) -> str | None:
    """Return the path of a file that is served, relative to the folder, or None for any other target."""
    if not isinstance(target, (str, os.PathLike)):
        return None
    name = os.fspath(target)
    if not isinstance(name, str):
        return None
    path = os.path.relpath(os.path.realpath(name), os.path.realpath(folder.path))
    return path if path in folder.served else None


def _read_torch(folder: ServedFolder, path: str, arguments: Mapping[str, Any]) -> Any:
    file, buffer = folder.served[path]
    supported = (
        isinstance(file, TorchFile)
        and arguments["weights_only"] is True
        and arguments["pickle_module"] is None
        and not arguments["mmap"]
        and not arguments["pickle_load_args"]
        and str(arguments["map_location"]) != "meta"
        and tensor_files.loads_plainly()
    )
    if not supported:
        return NOT_SERVED
    assert isinstance(file, TorchFile)
    return load_torch(
        file, buffer, folder.pool, map_location=arguments["map_location"], threads=folder.threads
    )


def _read_safetensors(folder: ServedFolder, path: str, arguments: Mapping[str, Any]) -> Any:
    file, buffer = folder.served[path]
    if not isinstance(file, SafetensorsFile):
        return NOT_SERVED
    return load_safetensors(file, buffer, folder.pool, device=arguments["device"], threads=folder.threads)


def _read_nothing(folder: ServedFolder, path: str, arguments: Mapping[str, Any]) -> Any:
    return NOT_SERVED
