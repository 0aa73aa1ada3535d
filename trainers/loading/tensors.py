"""Load one file of a snapshot from its buffer: what `torch.load` and safetensors' `load_file` would return.

Every tensor gets memory of its own. None refers to the buffer, which the next snapshot overwrites. Called by
`interception.py`, which decides for which calls.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.buffer import aligned
from grpo_run.runtime.staging.buffer_reader import SnapshotBufferReader
from grpo_run.runtime.staging.index import SafetensorsFile, TorchFile
from grpo_run.trainers.capture.copying import copy_out
from grpo_run.trainers.loading.memory_pool import MemoryPool
from grpo_run.trainers.upstream import tensor_files

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
