"""Checkpoints with a manifest, made of a few bytes."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import MANIFEST, Manifest, write_manifest
from support.identities import identity

FILES = {
    "model.safetensors": b"weights" * 1000,
    "trainer_state.json": b"{}",
    "global_step5/zero_pp_rank_0.pt": b"optimizer",
    "empty.txt": b"",
}


def fill(path: Path) -> Path:
    """Write the files of a checkpoint without a manifest."""
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def publish(path: Path, *, step: int = 5) -> Manifest:
    """Write a complete checkpoint of two ranks with a manifest."""
    return write_manifest(fill(path), identity(step=step, world_size=2, versions={"torch": "2.13.0"}))


def rewrite(path: Path, **changes: object) -> None:
    """Change fields of a manifest without updating its seal; None removes a field."""
    raw = json.loads((path / MANIFEST).read_text()) | changes
    (path / MANIFEST).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
