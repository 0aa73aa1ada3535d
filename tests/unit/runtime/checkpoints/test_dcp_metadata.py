"""Expected file sizes read from a torch distributed checkpoint's `.metadata`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo_run.runtime.checkpoints.file_checks import UnreadableMetadataError, read_file_sizes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that torch wrote, with two tensors, a number and a string."""
    state = {
        "a": torch.zeros(300),
        "b": {"c": torch.zeros(4, 5, dtype=torch.bfloat16)},
        "step": 3,
        "name": "x",
    }
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    return tmp_path


def test_the_sizes_equal_those_of_torchs_files(saved: Path) -> None:
    """The sizes are exact."""
    files = {file.name: file.stat().st_size for file in saved.glob("*.distcp")}
    assert files
    assert read_file_sizes((saved / ".metadata").read_bytes()) == files


def test_truncated_metadata_is_unreadable(saved: Path) -> None:
    """Truncation at any length raises the same error."""
    content = (saved / ".metadata").read_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(UnreadableMetadataError):
            read_file_sizes(content[:length])


class Evil:
    """An object whose unpickling calls a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_no_code_in_the_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints may come from untrusted sources."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableMetadataError):
        read_file_sizes(pickle.dumps({"storage_data": Evil()}))
    assert os.listdir(tmp_path) == []
