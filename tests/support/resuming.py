"""Checkpoints without a manifest, ways to damage a checkpoint, and the types of the resuming fixtures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from grpo_run.runtime.rank.resuming.request import ResumeChoice
from support import checkpoint_files

STARTED_AT = 2_000_000_000.0
"""Wall time of the start of the run."""
Save = Callable[..., Path]
Ask = Callable[..., ResumeChoice]
Rejected = list[tuple[str, str]]


def plain(folder: Path, step: int, *, written_at: float | None = None, ranks: int = 2) -> Path:
    """Write a checkpoint like transformers, without a manifest."""
    path = checkpoint_files.plain(folder, step, ranks=ranks)
    if written_at is not None:
        os.utime(path, (written_at, written_at))
    return path


def flip_a_byte(path: Path) -> None:
    """Change one byte of the weights."""
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def remove_a_file(path: Path) -> None:
    """Remove a file, as if the process was killed during the save."""
    (path / "optimizer.pt").unlink()
