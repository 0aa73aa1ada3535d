"""A synced reference model is restored, replicated or sharded; a file of another shape is rejected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.exact import Begun, Trainer

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact import format


def reference(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def synced(model: Any) -> Trainer:
    trainer = Trainer(ref_model=model)
    trainer.args.sync_ref_model = True
    return trainer


def test_a_replicated_reference_model_is_restored_on_every_rank(begin: Begun, tmp_path: Path) -> None:
    """A replicated model is written once, by rank 0."""
    for rank in (0, 1):
        begin(synced(reference(3.0)), rank=rank, world_size=2).save(tmp_path)
    assert sorted(path.name for path in (tmp_path / format.FOLDER).glob("reference*")) == [
        "reference0.safetensors"
    ]
    for rank in (0, 1):
        model = reference(0.0)
        begin(synced(model), tmp_path, rank=rank, world_size=2)
        assert all((parameter == 3.0).all() for parameter in model.parameters())


def test_a_reference_model_that_does_not_change_is_not_written(begin: Begun, tmp_path: Path) -> None:
    """Without `sync_ref_model`, no file is written."""
    begin(Trainer(ref_model=reference(3.0))).save(tmp_path)
    assert not list((tmp_path / format.FOLDER).glob("reference*"))


class Zero3(torch.nn.Module):
    """A model as DeepSpeed ZeRO-3 partitions it: empty parameters with the shard in `ds_tensor`."""

    def __init__(self, value: float, status: str = "NOT_AVAILABLE") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(0))
        self.partitioned = 0
        weight: Any = self.weight
        weight.ds_tensor = torch.full((3,), value)
        weight.ds_status = SimpleNamespace(name=status)

        def partition(*, has_been_updated: bool) -> None:
            assert not has_been_updated
            self.partitioned += 1

        weight.partition = partition


def test_a_sharded_reference_model_is_restored_per_rank(begin: Begun, tmp_path: Path) -> None:
    """Each rank loads its own shard and releases a gathered copy of the parameter."""
    for rank in (0, 1):
        begin(synced(Zero3(float(rank))), rank=rank, world_size=2).save(tmp_path)
    for rank in (0, 1):
        model = Zero3(9.0, "AVAILABLE")
        begin(synced(model), tmp_path, rank=rank, world_size=2)
        assert model.weight.ds_tensor.tolist() == [rank] * 3  # type: ignore[attr-defined]
        assert model.partitioned == 1


@pytest.mark.parametrize("other", [torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False)])
def test_a_reference_model_of_another_shape_is_rejected(begin: Begun, tmp_path: Path, other: Any) -> None:
    """The error is a CheckpointError, for other shapes and for other parameter names."""
    begin(synced(reference(3.0))).save(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the reference model"):
        begin(synced(other), tmp_path)
