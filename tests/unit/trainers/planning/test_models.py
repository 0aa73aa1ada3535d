"""Models of many architectures: what their layers keep while they generate, which attention they have, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_run.cli.main import main
from grpo_run.trainers.planning.job import Job
from grpo_run.trainers.planning.model_config import build_config, default_attention, shape_of
from grpo_run.trainers.planning.prediction import Predictor
from grpo_run.trainers.planning.sizes import sizes_of
from grpo_run.trainers.planning.terms import terms
from grpo_run.trainers.planning.traces.cached_layers import cached_layers

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 96,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "multi_query": True},
    "deepseek_v3": {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    },
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
}  # fmt: skip
"""Sizes by type, beside the common ones."""
LENGTH = 10


def config_of(kind: str) -> Any:
    """Return the configuration of a small model of a type."""
    return build_config({"model_type": kind, **COMMON, **MODELS[kind]}, kind)


@pytest.mark.parametrize("kind", MODELS)
def test_the_cache_that_is_predicted_is_that_of_a_real_model(kind: str) -> None:
    """Heads that are shared, compressed or repeated are counted as they are kept."""
    config = config_of(kind)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long), use_cache=True).past_key_values
    kept = [one.keys.numel() + one.values.numel() for one in cache.layers]
    assert [one.values * LENGTH for one in cached_layers(config, 2)] == kept


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    """Every second layer of Gemma 2."""
    windows = [one.longest for one in cached_layers(config_of("gemma2"), 2)]
    assert windows == [16, None]
    config = config_of("mistral")
    shape = Predictor(config).shape
    short, long = (
        next(one for one in terms(job, shape, None, 1) if "cache" in one.name)
        for job in (Job(batch=1, prompt=8, completion=length) for length in (8, 4000))
    )
    assert short.low_bytes == long.low_bytes


def test_layers_without_keys_keep_nothing_of_a_token() -> None:
    """Convolutions keep a few tokens, however long a row is."""
    kinds = ["conv", "full_attention"]
    config = build_config(
        {
            "model_type": "lfm2",
            **COMMON,
            "num_key_value_heads": 2,
            "layer_types": kinds,
            "block_multiple_of": 32,
        },
        "lfm2",
    )
    assert [one.values > 0 for one in cached_layers(config, 2)] == [False, True]


def test_further_layers_are_like_the_last_one_that_is_built() -> None:
    """A deep model is not built as a whole."""
    config = build_config(
        {"model_type": "qwen2", **COMMON, "num_key_value_heads": 2, "num_hidden_layers": 9}, "qwen2"
    )
    found = cached_layers(config, 4)
    assert len(found) == 9
    assert len(set(found)) == 1
    job = Job(batch=3, prompt=8, completion=24)
    shape = Predictor(config).shape
    (cache,) = (one for one in terms(job, shape, None, 1) if "cache" in one.name)
    (plain,) = (one for one in terms(job, shape_of(config), None, 1) if "cache" in one.name)
    assert cache.low_bytes == plain.low_bytes
    assert sizes_of(job, shape, 1).generated_rows == 3


@pytest.mark.parametrize(("kind", "attention"), [("qwen2", "sdpa"), ("gpt2", "sdpa"), ("gemma2", "eager")])
def test_a_model_has_the_attention_that_transformers_chooses(kind: str, attention: str) -> None:
    """Stored matrices where a model has no other."""
    config = config_of(kind)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).config._attn_implementation == attention
    assert default_attention(config) == attention


def test_a_model_without_fused_attention_is_predicted_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it would be trained, and not refused."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", **COMMON, **MODELS["gemma2"]}))
    words = [
        "plan",
        "--model",
        str(tmp_path),
        "--batch",
        "2",
        "--prompt",
        "8",
        "--completion",
        "8",
        "--no-changes",
    ]
    assert main(words) == 0
    assert "stored (eager)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "jamba"])
def test_recurrent_models_are_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they keep depends on kernels for a GPU."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    assert main(["plan", "--model", str(tmp_path), "--batch", "2"]) == 2
    said = capsys.readouterr().err
    assert "models with recurrent layers" in said
    assert said.count("\n") == 1
