"""What is read of a trainer when its call begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.checkpoints.compatibility import BatchGeometry
from grpo_run.runtime.rank.trainer_facts import TrainerFacts


def trainer(**changes: Any) -> Any:
    """Return a trainer with the attributes that are read."""
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    arguments = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    return SimpleNamespace(**({"model": model, "args": arguments} | changes))


def test_full_shapes_and_type_names_are_returned() -> None:
    """Under ZeRO-3 the shape is in `ds_shape`."""
    made = trainer()
    assert TrainerFacts.of(made, 1).shapes == (("weight", (2, 3), "bfloat16"), ("bias", (2,), "bfloat16"))
    made.model.weight.ds_shape = torch.Size([20, 30])
    assert TrainerFacts.of(made, 1).shapes[0][1] == (20, 30)


def test_unknown_facts_are_none() -> None:
    """Holds for a model that is built later and for other argument types."""
    assert TrainerFacts.of(trainer(model=None), 1).shapes == ()
    assert TrainerFacts.of(trainer(args=SimpleNamespace()), 2).batch is None
    assert TrainerFacts.of(None, 2).batch is None
    fields = TrainerFacts.of(trainer(model=None, args=None), 2).manifest_fields
    assert fields == {
        "global_batch": None, "per_device_train_batch_size": None, "gradient_accumulation_steps": None,
        "layout": "ddp", "model_shape": None,
    }  # fmt: skip


def test_the_batch_counts_all_ranks() -> None:
    """It is the product of ranks, samples per device and accumulation."""
    assert TrainerFacts.of(trainer(), 3).batch == BatchGeometry(ranks=3, per_device=4, accumulation=2)
    fields = TrainerFacts.of(trainer(), 3).manifest_fields
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
    assert TrainerFacts.of(trainer(**flags), 1).layout == name


@pytest.mark.parametrize(
    ("settings", "ranks", "sleeps"),
    [
        ({}, 1, False),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 4}, 4, False),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 4}, 1, False),
        ({"use_vllm": False, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 4}, 1, False),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, 1, True),
        ({"use_vllm": False, "vllm_enable_sleep_mode": True}, 1, False),
    ],
)
def test_only_an_engine_that_runs_is_shared_and_sleeps(
    settings: dict[str, Any], ranks: int, sleeps: bool
) -> None:
    """Ranks of one engine draw the same random numbers; those of a server draw their own."""
    found = TrainerFacts.of(trainer(args=SimpleNamespace(**settings)), 8)
    assert (found.ranks_per_engine, found.engine_sleeps) == (ranks, sleeps)
