"""Tensors of all types, and the files that are written from a packed buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from grpo_run.runtime.snapshots.buffer import SnapshotBuffer, SnapshotBufferReader
from grpo_run.runtime.snapshots.headroom import Headroom
from grpo_run.runtime.snapshots.index import SnapshotIndex, parse_index
from grpo_run.runtime.snapshots.writer import write_files

Made = Callable[..., bytes | None]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def wide(folder: Path) -> Headroom:
    """Return a limit that is never reached."""
    return Headroom(name="a wide limit", free_bytes=1 << 40, total_bytes=1 << 40)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any type with random bytes."""
    size = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    return torch.empty(0, dtype=dtype).set_(content.untyped_storage(), 0, shape)


BASE = torch.arange(60.0)


def written(index: SnapshotIndex, buffer: SnapshotBuffer, folder: Path) -> dict[str, bytes]:
    """Write the files of an index to disk, via its JSON form, and return their contents."""
    with SnapshotBufferReader(buffer.path) as reader:
        paths = write_files(parse_index(index.to_json()), reader, folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with tied weights and its AdamW optimizer after two steps."""
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.arange(50)).square().mean().backward()
        optimizer.step()
    return model, optimizer
