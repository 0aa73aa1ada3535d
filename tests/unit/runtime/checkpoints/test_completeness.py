"""Completeness of a checkpoint without a manifest, in every layout."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoint_files as made

from grpo_run.runtime.checkpoints.completeness import count_ranks, find_problems, saved_tensors

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


@pytest.mark.parametrize("deep", [False, True])
def test_a_complete_checkpoint_has_no_problems(make: Maker, tmp_path: Path, deep: bool) -> None:
    """In each layout, with the world size given or inferred."""
    path = make(tmp_path, 5)
    assert find_problems(path, 2, verify_checksums=deep) == []
    assert find_problems(path, verify_checksums=deep) == []


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


def test_a_checkpoint_of_another_world_size_is_complete_if_the_number_of_ranks_is_certain(
    tmp_path: Path,
) -> None:
    """More ranks or one rank are certain; fewer of several may be an unfinished save."""
    four, one, two = (made.plain(tmp_path / str(ranks), 5, ranks=ranks) for ranks in (4, 1, 2))
    assert find_problems(four, 2) == []
    assert find_problems(one, 2) == []
    assert find_problems(two, 4) == ["rng_state_2.pth is missing", "rng_state_3.pth is missing"]
    assert [count_ranks(path) for path in (four, one, two)] == [4, 1, 2]


def test_a_numbered_random_state_requires_at_least_two_ranks(tmp_path: Path) -> None:
    """`rng_state_0.pth` alone is incomplete at any world size."""
    path = made.plain(tmp_path, 5)
    (path / "rng_state_1.pth").unlink()
    for world_size in (None, 1, 2):
        assert find_problems(path, world_size) == ["rng_state_1.pth is missing"]


def test_every_shard_in_the_index_is_required(tmp_path: Path) -> None:
    """A missing shard and an index without a weight map are problems."""
    path = made.plain(tmp_path, 5)
    (path / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        made.safetensors(path / name, {name: (2, 2)})
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    assert find_problems(path, 2) == []
    assert set(saved_tensors(path)) == set(names)
    (path / names[1]).unlink()
    assert find_problems(path, 2) == [f"{names[1]} is missing"]
    index.write_text("{}")
    assert find_problems(path, 2) != []


@pytest.mark.parametrize("folder", ["", "policy"])
def test_adapter_weights_replace_model_weights(tmp_path: Path, folder: str) -> None:
    """Adapters at the top or in a folder are accepted; a truncated one is a problem."""
    path = made.plain(tmp_path, 5)
    (path / "model.safetensors").unlink()
    (path / folder).mkdir(exist_ok=True)
    file = made.safetensors(path / folder / "adapter_model.safetensors")
    assert find_problems(path, 2) == []
    file.write_bytes(file.read_bytes()[:-1])
    assert "adapter_model.safetensors" in find_problems(path, 2)[0]


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}" + b" " * 40,
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_an_invalid_safetensors_header_is_one_problem(tmp_path: Path, header: bytes) -> None:
    """No header content raises an exception."""
    path = made.plain(tmp_path, 5)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (problem,) = find_problems(path, 2)
    assert problem.startswith("model.safetensors")


def test_a_missing_directory_is_a_problem(tmp_path: Path) -> None:
    """No exception is raised."""
    assert "cannot be read" in find_problems(tmp_path / "checkpoint-5", 2)[0]
    assert count_ranks(tmp_path / "checkpoint-5") is None
    assert saved_tensors(tmp_path / "checkpoint-5") == {}
