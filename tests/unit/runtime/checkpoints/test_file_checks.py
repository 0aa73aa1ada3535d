"""Checks of single checkpoint files: safetensors headers and torch archives."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import checkpoint_files as made

from grpo_run.runtime.checkpoints._file_checks import (
    DamagedFileError,
    check_distributed_folder,
    check_torch_file,
    read_safetensors_header,
)
from grpo_run.runtime.checkpoints.compatibility import SavedTensor


def test_the_header_of_a_file_that_safetensors_wrote_is_read(tmp_path: Path) -> None:
    """Names, types and shapes of all tensors, scalars and empty tensors included."""
    tensors = {
        "weight": torch.zeros(3, 4),
        "half": torch.zeros(5, dtype=torch.bfloat16),
        "flags": torch.zeros(2, 2, dtype=torch.bool),
        "scalar": torch.tensor(1, dtype=torch.int64),
        "empty": torch.zeros(0, 7),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_safetensors_header(tmp_path / "model.safetensors") == {
        "weight": SavedTensor(dtype="F32", shape=(3, 4)),
        "half": SavedTensor(dtype="BF16", shape=(5,)),
        "flags": SavedTensor(dtype="BOOL", shape=(2, 2)),
        "scalar": SavedTensor(dtype="I64", shape=()),
        "empty": SavedTensor(dtype="F32", shape=(0, 7)),
    }


def test_a_truncated_safetensors_file_is_rejected_with_its_size(tmp_path: Path) -> None:
    """The message names the size of the file, and the expected size if the header can be read."""
    file = made.safetensors(tmp_path / "model.safetensors", {"weight": (100,)})
    content = file.read_bytes()
    for length in (0, 7, 8, 20):
        file.write_bytes(content[:length])
        with pytest.raises(DamagedFileError, match=f"is truncated: {length} bytes"):
            read_safetensors_header(file)
    for length in (len(content) - 1, len(content) - 400):
        file.write_bytes(content[:length])
        with pytest.raises(DamagedFileError, match=f"has {length} bytes, its header says {len(content)}"):
            read_safetensors_header(file)
    file.write_bytes(content + b"x")
    with pytest.raises(
        DamagedFileError, match=f"has {len(content) + 1} bytes, its header says {len(content)}"
    ):
        read_safetensors_header(file)


def test_only_the_header_of_a_large_file_is_read(tmp_path: Path) -> None:
    """Reading all of this sparse file of 100 GB would exceed the test's timeout."""
    elements = 25 * 10**9
    header = made.safetensors(tmp_path / "small.safetensors", {"weight": (1,)}).read_bytes()[8:-4]
    header = header.replace(b"[1]", b"[%d]" % elements).replace(b"[0, 4]", b"[0, %d]" % (4 * elements))
    file = tmp_path / "large.safetensors"
    with open(file, "wb") as writer:
        writer.write(len(header).to_bytes(8, "little") + header)
        writer.truncate(8 + len(header) + 4 * elements)
    assert read_safetensors_header(file) == {"weight": SavedTensor(dtype="F32", shape=(elements,))}


def test_bytes_after_a_torch_archive_are_detected(tmp_path: Path) -> None:
    """`zipfile` alone would accept them as a comment."""
    file = made.torch_file(tmp_path / "optimizer.pt")
    check_torch_file(file, True)
    file.write_bytes(file.read_bytes() + bytes(30))
    with pytest.raises(DamagedFileError, match="is truncated or changed"):
        check_torch_file(file, False)


class Evil:
    """An object whose unpickling calls a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_no_code_in_the_metadata_of_a_distributed_checkpoint_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints may come from untrusted sources."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"storage_data": Evil()}))
    with pytest.raises(DamagedFileError, match="names no file"):
        check_distributed_folder(tmp_path)
    assert os.listdir(tmp_path) == [".metadata"]
