"""Whether a checkpoint without a manifest has all its parts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoint_files as made

from grpo_run.runtime.checkpoints import file_checks
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
    """A maker of one layout."""
    maker: Maker = MAKERS[request.param]
    return maker


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_checkpoint_lacks_nothing(make: Maker, tmp_path: Path, deep: bool) -> None:
    """In each layout, with the ranks known or not."""
    path = make(tmp_path, 5)
    assert find_problems(path, 2, verify_checksums=deep) == []
    assert find_problems(path, verify_checksums=deep) == []


def needed(path: Path) -> list[Path]:
    """Every file that a resume reads."""
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def optional(path: Path, file: Path) -> bool:
    """Not there in every checkpoint, so not missed; DeepSpeed keeps weights and schedule in files of its own."""
    names = ["config.json", "training_args.bin"]
    return file.name in names + (["model.safetensors", "scheduler.pt"] if (path / "latest").exists() else [])


def test_every_part_is_missed(make: Maker, tmp_path: Path) -> None:
    """Any one file taken away, its name is in what is said."""
    path = make(tmp_path, 5)
    for file in needed(path):
        if optional(path, file):
            continue
        content = file.read_bytes()
        file.unlink()
        lacks = ", ".join(find_problems(path, 2))
        assert file.name in lacks, (file, lacks)
        file.write_bytes(content)
    assert find_problems(path, 2) == []


def test_every_part_cut_short_is_seen(make: Maker, tmp_path: Path) -> None:
    """At a random length, and empty, by size, header or the archive's directory: nothing is read whole."""
    dice, path = random.Random(8), make(tmp_path, 5)
    for file in needed(path):
        content = file.read_bytes()
        for length in (0, len(content) - 1, dice.randrange(len(content))):
            file.write_bytes(content[:length])
            assert find_problems(path, 2) != [], (file, length)
        file.write_bytes(content)


def test_a_flipped_byte_in_a_torch_file_is_found_when_looked_for(tmp_path: Path) -> None:
    """By the archive's checksum; the entry is named."""
    path = made.plain(tmp_path, 5)
    file = path / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[content.index(b"numbers") + 10] ^= 4
    file.write_bytes(content)
    assert find_problems(path, 2) == []
    assert find_problems(path, 2, verify_checksums=True) == [
        "optimizer.pt does not match the checksum of its record archive/data/0"
    ]


def test_torchs_format_before_zip_is_taken_as_it_is(tmp_path: Path) -> None:
    """It holds nothing to compare with."""
    path = made.plain(tmp_path, 5)
    (path / "optimizer.pt").write_bytes(file_checks._LEGACY_PICKLE + b"rest")
    assert find_problems(path, 2, verify_checksums=True) == []


def test_another_number_of_ranks_is_complete_when_it_is_certain(tmp_path: Path) -> None:
    """More than now, or one alone; fewer of several may be a save that some ranks did not end."""
    four, one, two = (made.plain(tmp_path / str(ranks), 5, ranks=ranks) for ranks in (4, 1, 2))
    assert find_problems(four, 2) == []
    assert find_problems(one, 2) == []
    assert find_problems(two, 4) == ["rng_state_2.pth is missing", "rng_state_3.pth is missing"]
    assert [count_ranks(path) for path in (four, one, two)] == [4, 1, 2]


def test_one_ranks_state_of_two_is_incomplete(tmp_path: Path) -> None:
    """A numbered file says that there were several, whatever there are now."""
    path = made.plain(tmp_path, 5)
    (path / "rng_state_1.pth").unlink()
    for world_size in (None, 1, 2):
        assert find_problems(path, world_size) == ["rng_state_1.pth is missing"]


def test_shards_are_all_asked_for(tmp_path: Path) -> None:
    """As the index names them."""
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
def test_adapters_are_weights(tmp_path: Path, folder: str) -> None:
    """Beside the rest, or each in a folder of its own; damaged ones are seen."""
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
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_makes_no_sense_is_damage(tmp_path: Path, header: bytes) -> None:
    """Whatever it holds, one phrase and no exception."""
    path = made.plain(tmp_path, 5)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (lack,) = find_problems(path, 2)
    assert lack.startswith("model.safetensors")


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Not raised."""
    assert "cannot be read" in find_problems(tmp_path / "checkpoint-5", 2)[0]
    assert count_ranks(tmp_path / "checkpoint-5") is None
    assert saved_tensors(tmp_path / "checkpoint-5") == {}
