"""How long the files of torch's distributed format must be."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo_run.runtime.checkpoints.dcp_metadata import UnreadableMetadataError, read_file_sizes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What torch itself writes for two tensors, a number and a text."""
    state = {
        "a": torch.zeros(300),
        "b": {"c": torch.zeros(4, 5, dtype=torch.bfloat16)},
        "step": 3,
        "name": "x",
    }
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    return tmp_path


def test_sizes_are_those_of_the_files(saved: Path) -> None:
    """To the byte, for what torch has written."""
    files = {file.name: file.stat().st_size for file in saved.glob("*.distcp")}
    assert files
    assert read_file_sizes((saved / ".metadata").read_bytes()) == files


def test_a_cut_one_says_nothing(saved: Path) -> None:
    """At any length, one kind of error."""
    content = (saved / ".metadata").read_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(UnreadableMetadataError):
            read_file_sizes(content[:length])


class Evil:
    """What a pickle may ask for."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_nothing_in_it_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may come from anywhere."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableMetadataError):
        read_file_sizes(pickle.dumps({"storage_data": Evil()}))
    assert os.listdir(tmp_path) == []
