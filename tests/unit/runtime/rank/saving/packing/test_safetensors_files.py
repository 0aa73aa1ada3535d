"""Weights are packed as safetensors writes them, or refused if safetensors must write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from support.builders.trainers.packed_files import BASE, DTYPES, Made, filled, trained

from grpo_run.runtime.rank.saving.packing import pack_safetensors
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer


@pytest.mark.parametrize(
    "tensors",
    [
        {"one": torch.tensor(1.5)},
        {
            'é"\\\n\x01\x7f\u2028😀/': torch.ones(2),
            "z": torch.empty(0),
            "Z": torch.empty(0, 3),
            "": torch.ones(1),
        },
        {
            f"{dtype}.{name}": filled((3, size), dtype)
            for dtype in DTYPES
            for name, size in (("b", 1), ("a", 7))
        },
        {"view": BASE[10:20], "parameter": torch.nn.Parameter(torch.ones(3))},
        {"large": torch.arange(3_000_000), "small": torch.ones(1)},
    ],
    ids=["scalar", "names", "types", "views", "large"],
)
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'né"': "\n"}])
def test_weights_are_packed_as_safetensors_writes_them(
    safe_copy: Made, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    """Order, padding and escapes are equal."""
    copy = safe_copy(tensors, metadata)
    assert copy is not None
    assert copy == safetensors.torch.save(tensors, metadata)
    with safetensors.safe_open(str(tmp_path / "copy/model.safetensors"), "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == metadata


def test_the_weights_of_a_real_model_are_packed_as_safetensors_writes_them(safe_copy: Made) -> None:
    """Tied weights are refused, as safetensors rejects them."""
    state = trained()[0].state_dict()
    assert safe_copy(state) is None
    del state["3.weight"]
    assert safe_copy(state, {"format": "pt"}) == safetensors.torch.save(state, {"format": "pt"})


def test_a_tensor_with_a_freed_storage_is_refused(safe_copy: Made) -> None:
    """Sharding frees storages of parameters; no memory beyond the storage is read."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    assert safe_copy({"weight": tensor}) is None


def test_several_metadata_entries_are_packed(safe_copy: Made, tmp_path: Path) -> None:
    """safetensors writes them in random order, so the bytes of the header cannot be compared."""
    metadata = {name: name.upper() for name in "hello world"}
    copy = safe_copy({"weight": torch.ones(2)}, metadata)
    direct = safetensors.torch.save({"weight": torch.ones(2)}, metadata)
    assert copy is not None
    assert len(copy) == len(direct)
    (tmp_path / "direct.safetensors").write_bytes(direct)
    opened = [
        safetensors.safe_open(str(path), "pt")
        for path in (tmp_path / "copy/model.safetensors", tmp_path / "direct.safetensors")
    ]
    assert opened[0].metadata() == opened[1].metadata() == metadata
    assert opened[0].keys() == opened[1].keys()
    assert torch.equal(opened[0].get_tensor("weight"), opened[1].get_tensor("weight"))


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, None),
        ({}, {"format": "pt"}),
        ({"turned": torch.ones(2, 3).t()}, None),
        ({"one": BASE, "other": BASE}, None),
        ({"sparse": torch.eye(3).to_sparse()}, None),
        ({"meta": torch.empty(3, device="meta")}, None),
        ({"conjugate": torch.ones(2, dtype=torch.complex64).conj()}, None),
        ({"wide": torch.ones(2, dtype=torch.complex128)}, None),
        ({"packed": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, None),
        ({"text": "no tensor"}, None),
        ({1: torch.ones(1)}, None),
        ({"\ud800": torch.ones(1)}, None),
        ({"__metadata__": torch.ones(1)}, None),
        ({"weight": torch.ones(1)}, {"number": 1}),
        ({"weight": torch.ones(1)}, "text"),
        ([torch.ones(1)], None),
        (None, None),
    ],
    ids=lambda value: None,
)
def test_tensors_that_safetensors_must_write_are_refused(
    buffer: SnapshotBuffer, tensors: Any, metadata: Any
) -> None:
    """safetensors raises its own error or writes another format; nothing is appended."""
    assert pack_safetensors(buffer, "x.safetensors", tensors, metadata) is None
    assert buffer.held_bytes == 0
