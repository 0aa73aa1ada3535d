"""A buffer, and the same object as packed and as the libraries write it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builders.trainers.packed_files import Made, wide, written

from grpo_run.runtime.rank.saving.packing import pack_safetensors, pack_torch
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer
from grpo_run.runtime.snapshots.index import SnapshotIndex


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[SnapshotBuffer]:
    """An empty buffer."""
    with SnapshotBuffer(tmp_path / "buffer", measure=wide) as made:
        yield made


@pytest.fixture
def torch_copy(buffer: SnapshotBuffer, tmp_path: Path) -> Made:
    """Pack an object and return the bytes of the archive, or None if it is refused."""

    def make(obj: Any, name: str = "optimizer.pt", protocol: int = 2) -> bytes | None:
        file = pack_torch(buffer, name, obj, protocol=protocol, disable_byteorder_record=False)
        return None if file is None else written(SnapshotIndex(files=[file]), buffer, tmp_path / "copy")[name]

    return make


@pytest.fixture
def torch_direct(tmp_path: Path) -> Made:
    """Save an object with torch and return the bytes of the archive."""

    def make(obj: Any, name: str = "optimizer.pt", protocol: int = 2) -> bytes:
        path = tmp_path / "direct" / name
        path.parent.mkdir(exist_ok=True)
        torch.save(obj, path, pickle_protocol=protocol)
        return path.read_bytes()

    return make


@pytest.fixture
def safe_copy(buffer: SnapshotBuffer, tmp_path: Path) -> Made:
    """Pack tensors and return the bytes of the file, or None if they are refused."""

    def make(tensors: Any, metadata: Any = None) -> bytes | None:
        file = pack_safetensors(buffer, "model.safetensors", tensors, metadata)
        if file is None:
            return None
        return written(SnapshotIndex(files=[file]), buffer, tmp_path / "copy")["model.safetensors"]

    return make
