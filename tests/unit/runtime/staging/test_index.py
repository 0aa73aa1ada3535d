"""The index of an arena: kept as JSON, checked when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.index import (
    Record,
    SafetensorsFile,
    SnapshotIndex,
    TorchFile,
    parse_index,
    read_index,
)


def torch_file(path: str = "optimizer.pt", size: int = 100) -> TorchFile:
    """A file of two records."""
    records = (Record(name="data.pkl", offset=0, size=10), Record(name="data/0", offset=64, size=size))
    return TorchFile(path=path, records=records, compute_crc32=True, storage_alignment=64)


def weights(path: str = "model.safetensors") -> SafetensorsFile:
    """A file of one record."""
    return SafetensorsFile(path=path, records=(Record(name="file", offset=192, size=7),))


def test_an_image_comes_back_from_json(tmp_path: Path) -> None:
    """With each file's kind."""
    image = SnapshotIndex(files=[torch_file(), weights("sub/model.safetensors")])
    (tmp_path / "image.json").write_bytes(image.to_json())
    assert read_index(tmp_path / "image.json") == image == parse_index(image.to_json())


def test_sizes_add_up() -> None:
    """All records of all files."""
    assert SnapshotIndex(files=[torch_file(size=100), weights()]).size_bytes == 117


def test_the_last_save_of_a_path_counts() -> None:
    """As on disk."""
    image = SnapshotIndex()
    image.put(torch_file(size=1))
    image.put(weights())
    image.put(torch_file(size=2))
    assert image.paths == ["model.safetensors", "optimizer.pt"]
    assert image.size_bytes == 10 + 2 + 7
    image.drop("optimizer.pt")
    image.drop("never there")
    assert image.paths == ["model.safetensors"]


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../up", "a/../../up", "a/..", "//x", ".", "nul\0"])
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    """Whoever writes the files does so with another process's rights."""
    with pytest.raises(pydantic.ValidationError, match="not a path below"):
        torch_file(path)
    content = SnapshotIndex(files=[torch_file()]).model_dump()
    content["files"][0]["path"] = path
    with pytest.raises(CheckpointError, match="not a path below"):
        parse_index(json.dumps(content).encode())


@pytest.mark.parametrize("path", ["a..b", "..a", "a/b/c.pt", "é.pt", "a b"])
def test_a_path_below_is_taken(path: str) -> None:
    """Dots alone do not lead out."""
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
def test_what_is_not_an_image_is_refused(change: dict[str, Any]) -> None:
    """Another schema, a path twice, an unknown kind, records that make no sense."""
    content = json.dumps(SnapshotIndex().model_dump() | change).encode()
    with pytest.raises(CheckpointError, match="not a snapshot index"):
        parse_index(content)


def test_a_torn_image_is_refused(tmp_path: Path) -> None:
    """By name."""
    torn = tmp_path / "image.json"
    torn.write_bytes(SnapshotIndex(files=[torch_file()]).to_json()[:-5])
    with pytest.raises(CheckpointError, match=r"image\.json: not a snapshot index"):
        read_index(torn)
    with pytest.raises(CheckpointError, match=r"absent\.json cannot be read: No such file"):
        read_index(tmp_path / "absent.json")
