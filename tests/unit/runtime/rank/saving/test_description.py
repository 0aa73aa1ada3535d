"""The model, batch and layout of a trainer are described for the manifest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.checkpoints.compatibility import BatchGeometry
from grpo_run.runtime.rank.saving import description


def trainer(**changes: Any) -> Any:
    """Return a trainer with the attributes that are read."""
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    arguments = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    return SimpleNamespace(**({"model": model, "args": arguments} | changes))


def test_full_shapes_and_type_names_are_returned() -> None:
    """Under ZeRO-3 the shape is in `ds_shape`."""
    made = trainer()
    assert description.named_shapes(made) == (("weight", (2, 3), "bfloat16"), ("bias", (2,), "bfloat16"))
    made.model.weight.ds_shape = torch.Size([20, 30])
    assert description.named_shapes(made)[0][1] == (20, 30)


def test_unknown_facts_are_none() -> None:
    """Holds for a model that is built later and for other argument types."""
    assert description.named_shapes(trainer(model=None)) == ()
    assert description.batch(trainer(args=SimpleNamespace()), 2) is None
    assert description.batch(None, 2) is None
    fields = description.manifest_fields(trainer(model=None, args=None), 2)
    assert fields == {
        "global_batch": None, "per_device_train_batch_size": None, "gradient_accumulation_steps": None,
        "layout": "ddp", "model_shape": None,
    }  # fmt: skip


def test_the_batch_counts_all_ranks() -> None:
    """It is the product of ranks, samples per device and accumulation."""
    assert description.batch(trainer(), 3) == BatchGeometry(ranks=3, per_device=4, accumulation=2)
    fields = description.manifest_fields(trainer(), 3)
    assert (fields["global_batch"], fields["per_device_train_batch_size"]) == (24, 4)
    assert len(fields["model_shape"]) == 64


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "ddp"),
        (
            {
                "is_deepspeed_enabled": True,
                "accelerator": SimpleNamespace(
                    state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
                ),
            },
            "deepspeed-zero3",
        ),
        ({"is_fsdp_enabled": True, "accelerator": SimpleNamespace(is_fsdp2=True)}, "fsdp2"),
        ({"is_fsdp_enabled": True, "accelerator": SimpleNamespace(is_fsdp2=False)}, "fsdp1"),
        ({"is_tp_enabled": True}, "tensor-parallel"),
    ],
)
def test_the_layout_is_named(flags: dict[str, Any], name: str) -> None:
    """The trainer's own flags decide."""
    assert description.layout(trainer(**flags)) == name
