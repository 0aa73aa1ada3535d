"""The snapshot index: stored as JSON, validated when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.snapshots.index import (
    BufferRecord,
    SafetensorsFile,
    SnapshotIndex,
    TorchFile,
    parse_index,
    read_index,
)


def torch_file(path: str = "optimizer.pt", size: int = 100) -> TorchFile:
    """A file with two records."""
    records = (
        BufferRecord(name="data.pkl", offset=0, size=10),
        BufferRecord(name="data/0", offset=64, size=size),
    )
    return TorchFile(path=path, records=records, compute_crc32=True, storage_alignment=64)


def weights(path: str = "model.safetensors") -> SafetensorsFile:
    """A file with one record."""
    return SafetensorsFile(path=path, records=(BufferRecord(name="file", offset=192, size=7),))


def test_an_index_is_restored_from_json(tmp_path: Path) -> None:
    """Each file keeps its kind."""
    index = SnapshotIndex(files=[torch_file(), weights("sub/model.safetensors")])
    (tmp_path / "rank0.json").write_bytes(index.to_json())
    assert read_index(tmp_path / "rank0.json") == index == parse_index(index.to_json())


def test_the_size_is_the_sum_of_all_records() -> None:
    """The records of all files count."""
    assert SnapshotIndex(files=[torch_file(size=100), weights()]).size_bytes == 117


def test_the_last_file_of_a_path_replaces_earlier_ones() -> None:
    """A file on disk would be replaced too."""
    index = SnapshotIndex()
    index.put(torch_file(size=1))
    index.put(weights())
    index.put(torch_file(size=2))
    assert index.paths == ["model.safetensors", "optimizer.pt"]
    assert index.size_bytes == 10 + 2 + 7
    index.drop("optimizer.pt")
    index.drop("never there")
    assert index.paths == ["model.safetensors"]


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../up", "a/../../up", "a/..", "//x", ".", "nul\0"])
def test_a_path_outside_the_checkpoint_is_refused(path: str) -> None:
    """The drain worker writes with the supervisor's rights."""
    with pytest.raises(pydantic.ValidationError, match="not a path below"):
        torch_file(path)
    content = SnapshotIndex(files=[torch_file()]).model_dump()
    content["files"][0]["path"] = path
    with pytest.raises(CheckpointError, match="not a path below"):
        parse_index(json.dumps(content).encode())


@pytest.mark.parametrize("path", ["a..b", "..a", "a/b/c.pt", "é.pt", "a b"])
def test_a_path_below_the_checkpoint_is_accepted(path: str) -> None:
    """Dots in names are allowed."""
    assert parse_index(SnapshotIndex(files=[torch_file(path)]).to_json()).paths == [path]


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"files": [torch_file().model_dump(), torch_file().model_dump()]},
        {"files": [torch_file().model_dump() | {"kind": "numpy"}]},
        {"files": [weights().model_dump() | {"records": []}]},
        {"files": [weights().model_dump() | {"records": [{"name": "file", "offset": -1, "size": 1}]}]},
        {"files": [weights().model_dump() | {"records": [{"name": "file", "offset": 0, "size": -1}]}]},
        {"surplus": 1},
    ],
)
def test_an_invalid_index_is_refused(change: dict[str, Any]) -> None:
    """Another schema, a duplicate path, an unknown kind, invalid records, unknown fields."""
    content = json.dumps(SnapshotIndex().model_dump() | change).encode()
    with pytest.raises(CheckpointError, match="not a snapshot index"):
        parse_index(content)


def test_a_truncated_or_missing_index_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    torn = tmp_path / "rank0.json"
    torn.write_bytes(SnapshotIndex(files=[torch_file()]).to_json()[:-5])
    with pytest.raises(CheckpointError, match=r"rank0\.json: not a snapshot index"):
        read_index(torn)
    with pytest.raises(CheckpointError, match=r"absent\.json cannot be read: No such file"):
        read_index(tmp_path / "absent.json")
