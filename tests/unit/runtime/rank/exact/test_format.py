"""The files of the exact state are read back equal; invalid files raise a clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact import format
from grpo_run.runtime.rank.exact.encoding import Decoder, encode
from grpo_run.runtime.rank.exact.format import SavedRankState, rank_state_path, read, write

CPU = torch.device("cpu")


def rank_state(**changes: Any) -> SavedRankState:
    return SavedRankState(
        **({"schema_version": format.SCHEMA, "rank": 0, "world_size": 1, "step": 3} | changes)
    )


def test_slices_of_one_tensor_can_be_saved(tmp_path: Path) -> None:
    """The micro-batches of a rollout share memory, which safetensors rejects without a copy."""
    full, tensors = torch.arange(8.0).reshape(4, 2), dict[str, torch.Tensor]()
    encoded = encode([{"x": full[:2], "n": full[0, 0]}, {"x": full[2:], "n": full[0, 0]}], tensors, "value")
    write(tmp_path, rank_state(buffered_inputs=encoded), tensors)
    found, loaded = read(tmp_path, 0)
    parts = Decoder(loaded, CPU, "file")(found.buffered_inputs)
    assert torch.equal(torch.cat([part["x"] for part in parts]), full)


def test_files_are_private(tmp_path: Path) -> None:
    """The files contain prompts and completions, so their mode is 0600."""
    write(tmp_path, rank_state(buffered_inputs=encode([torch.ones(1)], tensors := {}, "value")), tensors)
    files = sorted((tmp_path / format.FOLDER).iterdir())
    assert [file.name for file in files] == ["rank0.json", "rank0.safetensors"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_second_save_of_a_step_removes_old_tensors(tmp_path: Path) -> None:
    """A tensor file of the first save does not belong to the second."""
    write(tmp_path, rank_state(), {"t0": torch.ones(1)})
    write(tmp_path, rank_state(), {})
    assert not rank_state_path(tmp_path, 0).with_suffix(".safetensors").exists()
    assert read(tmp_path, 0) == (rank_state(), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"rank0\.json cannot be read: No such file"),
        (b"", "is not JSON"),
        (b'{"schema_version": 1, "rank"', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a valid rank state"),
        (b"{}", "is not a valid rank state: schema_version"),
        (
            b'{"schema_version": 1, "rank": "0", "world_size": 1, "step": 3}',
            "is not a valid rank state: rank",
        ),
        (
            b'{"schema_version": 1, "rank": 0, "world_size": 0, "step": 3}',
            "is not a valid rank state: world_size",
        ),
        (
            b'{"schema_version": 9, "rank": 0, "world_size": 1, "step": 3}',
            "schema version 9; this release supports 1",
        ),
        (b'{"schema_version": 1, "rank": 7, "world_size": 8, "step": 3}', "is the state of rank 7"),
        (
            b'{"schema_version": 1, "rank": 0, "world_size": 1, "step": 3, "has_tensors": true}',
            "cannot be read",
        ),
    ],
)
def test_a_missing_or_invalid_file_is_rejected(content: bytes | None, message: str, tmp_path: Path) -> None:
    """The error is a CheckpointError with the file name and the reason, not an error of a library."""
    path = rank_state_path(tmp_path, 0)
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, 0)
    assert "rank0." in str(caught.value)


@given(cut=st.floats(min_value=0, max_value=0.999))
def test_a_truncated_file_is_rejected(cut: float, make_folder: Callable[[], Path]) -> None:
    """Holds for both files, truncated at any place."""
    folder = make_folder()
    for suffix in (".json", ".safetensors"):
        write(folder, rank_state(), {"t0": torch.ones(5)})
        path = rank_state_path(folder, 0).with_suffix(suffix)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
        with pytest.raises(CheckpointError):
            read(folder, 0)
