"""Completeness of a checkpoint without a manifest, in every layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoint_files as made

from grpo_run.runtime.checkpoints.completeness import find_problems

MAKERS = {
    "ddp": made.plain,
    "zero2": lambda folder, step, ranks=2: made.deepspeed(folder, step, ranks=ranks, stage=2),
    "zero3": lambda folder, step, ranks=2: made.deepspeed(folder, step, ranks=ranks, stage=3),
    "fsdp2": made.fsdp,
}
Maker = Callable[..., Path]


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Maker:
    """A function that writes a complete checkpoint in one layout."""
    maker: Maker = MAKERS[request.param]
    return maker


def required_files(path: Path) -> list[Path]:
    """Every file of the checkpoint."""
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def is_optional(path: Path, file: Path) -> bool:
    """Files that are not in every checkpoint. DeepSpeed stores weights and scheduler state itself."""
    names = ["config.json", "training_args.bin"]
    return file.name in names + (["model.safetensors", "scheduler.pt"] if (path / "latest").exists() else [])


def test_every_missing_file_is_named(make: Maker, tmp_path: Path) -> None:
    """Each required file is removed in turn."""
    path = make(tmp_path, 5)
    for file in required_files(path):
        if is_optional(path, file):
            continue
        content = file.read_bytes()
        file.unlink()
        problems = ", ".join(find_problems(path, 2))
        assert file.name in problems, (file, problems)
        file.write_bytes(content)
    assert find_problems(path, 2) == []


def test_every_truncated_file_is_detected(make: Maker, tmp_path: Path) -> None:
    """Each file is truncated to nothing, by one byte, and at a random length."""
    dice, path = random.Random(8), make(tmp_path, 5)
    for file in required_files(path):
        content = file.read_bytes()
        for length in (0, len(content) - 1, dice.randrange(len(content))):
            file.write_bytes(content[:length])
            assert find_problems(path, 2) != [], (file, length)
        file.write_bytes(content)


def test_a_flipped_byte_in_a_torch_file_is_found_by_its_checksum(tmp_path: Path) -> None:
    """Only when checksums are verified; the message names the record."""
    path = made.plain(tmp_path, 5)
    file = path / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[content.index(b"numbers") + 10] ^= 4
    file.write_bytes(content)
    assert find_problems(path, 2) == []
    assert find_problems(path, 2, verify_checksums=True) == [
        "optimizer.pt does not match the checksum of its record archive/data/0"
    ]


def test_a_file_in_torchs_legacy_format_is_accepted(tmp_path: Path) -> None:
    """The format has no checksums."""
    path = made.plain(tmp_path, 5)
    torch.save({"step": 5}, path / "optimizer.pt", _use_new_zipfile_serialization=False)
    assert find_problems(path, 2, verify_checksums=True) == []
