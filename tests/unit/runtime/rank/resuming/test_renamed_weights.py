"""A resume loads weights that a checkpoint has under other names, and says which it does not have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from grpo_run.runtime.rank.resuming.renamed_weights import restore_renamed_weights

SIZES: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def experts() -> Any:
    """A mixture of experts, which transformers saves in the format of its publisher."""
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=3,
        num_experts_per_tok=2)
    )  # fmt: skip


class Trainer:
    """Loads as transformers' Trainer does: files by name, in the order of their shards, ignoring what does
    not fit.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def _load_from_checkpoint(self, checkpoint: str) -> None:
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            self.model.load_state_dict(safetensors.torch.load_file(file), False)


def resumed(model: Any, checkpoint: Path) -> list[str]:
    """Load a checkpoint into a model; return the warnings."""
    warnings: list[str] = []
    trainer = Trainer(model)
    with restore_renamed_weights(trainer, warnings.append):
        trainer._load_from_checkpoint(os.fspath(checkpoint))
    assert "load_state_dict" not in vars(model)
    assert "_load_from_checkpoint" not in vars(trainer)
    return warnings


def equal(one: Any, other: Any) -> bool:
    """Whether two models have the same weights."""
    others = other.state_dict()
    return all(torch.equal(tensor, others[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "2KB"}])
def test_experts_are_loaded_from_the_names_of_their_publisher(tmp_path: Path, shards: dict[str, str]) -> None:
    """From one file or from several; transformers alone would leave them as the script made them."""
    saved, model = experts(), experts()
    saved.save_pretrained(tmp_path, **shards)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if shards else True
    unaided = experts()
    Trainer(unaided)._load_from_checkpoint(os.fspath(tmp_path))
    assert not equal(saved, unaided)
    assert resumed(model, tmp_path) == []
    assert equal(saved, model)


def test_a_trained_parameter_that_is_missing_is_named(tmp_path: Path) -> None:
    """One that is frozen is not: the script has made it as it was."""
    saved, model = Qwen2ForCausalLM(Qwen2Config(**SIZES)), Qwen2ForCausalLM(Qwen2Config(**SIZES))
    tensors = dict(saved.state_dict())
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"], tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    model.get_submodule("model.norm").requires_grad_(requires_grad=False)
    model.get_submodule("lm_head").requires_grad_(requires_grad=False)
    (warning,) = resumed(model, tmp_path)
    assert (
        "does not have 1 trained parameter of Qwen2ForCausalLM (model.layers.0.mlp.up_proj.weight)" in warning
    )


def test_tied_weights_and_loads_of_other_kinds_are_not_missed(tmp_path: Path) -> None:
    """A tied head is not in the file, and adapters or shards are not loaded by `load_state_dict` of the
    model.
    """
    tied = Qwen2Config(**SIZES, tie_word_embeddings=True)
    saved, model = Qwen2ForCausalLM(tied), Qwen2ForCausalLM(tied)
    assert resumed(model, tmp_path) == []
    saved.save_pretrained(tmp_path)
    assert resumed(model, tmp_path) == []
    assert equal(saved, model)
