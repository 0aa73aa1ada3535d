"""transformers keeps one hook on the input embeddings, however often gradient checkpointing is enabled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from trl.models.utils import disable_gradient_checkpointing

from grpo_run.runtime.upstream.input_gradients import HANDLE, one_hook_per_model


@pytest.fixture
def model() -> Any:
    """A model whose input embeddings can be counted."""
    config = Qwen2Config(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def rollouts(model: Any, count: int) -> int:
    """Leave and enter gradient checkpointing as TRL does around rollouts; return the hooks of the
    embeddings.
    """
    model.gradient_checkpointing_enable()
    for _ in range(count):
        with disable_gradient_checkpointing(model, None):
            pass
    return len(model.get_input_embeddings()._forward_hooks)


def test_without_the_cure_each_rollout_leaves_a_hook(model: Any) -> None:
    """If this fails, transformers or TRL has mended it, and the cure can be deleted."""
    assert rollouts(model, 5) == 6


def test_the_hooks_of_rollouts_do_not_add_up(model: Any) -> None:
    told: list[None] = []
    with one_hook_per_model(lambda: told.append(None)):
        assert rollouts(model, 5) == 1
    assert len(told) == 5
    assert getattr(model, HANDLE, None) is not None


def test_gradients_still_reach_the_embeddings_output(model: Any) -> None:
    """The remaining hook does what transformers needs it for."""
    with one_hook_per_model(lambda: None):
        rollouts(model, 3)
    model.get_input_embeddings().weight.requires_grad_(False)
    assert model.get_input_embeddings()(torch.tensor([[1, 2]])).requires_grad


def test_a_hook_of_the_script_stays(model: Any) -> None:
    calls: list[None] = []
    model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(None))
    with one_hook_per_model(lambda: None):
        assert rollouts(model, 3) == 2
    model(torch.tensor([[1, 2]]))
    assert calls == [None]


def test_the_first_time_is_not_told(model: Any) -> None:
    told: list[None] = []
    with one_hook_per_model(lambda: told.append(None)):
        model.enable_input_require_grads()
    assert told == []


def test_the_class_is_as_before_after_the_block() -> None:
    method = PreTrainedModel.enable_input_require_grads
    with one_hook_per_model(lambda: None):
        assert PreTrainedModel.enable_input_require_grads is not method
    assert PreTrainedModel.enable_input_require_grads is method
