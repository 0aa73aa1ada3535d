"""Models of many architectures: what they need to generate, which attention they have, and what is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.live_bytes import LiveBytes
from transformers import AutoModelForCausalLM

from grpo_run.cli.main import main
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import build_config, default_attention
from grpo_run.runtime.planning.prediction import Predictor

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
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
}
"""Sizes by type, beside the common ones."""
IN_SHORT = ("qwen2", "deepseek_v3")
"""Heads that are shared, and compressed ones."""
PROMPT, COMPLETION = 12, 20


def config_of(kind: str) -> Any:
    """Return the configuration of a small model of a type."""
    return build_config({"model_type": kind, **COMMON, **MODELS[kind]}, kind)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_SHORT else pytest.mark.full) for kind in MODELS]
)
def test_generation_is_predicted_as_a_real_model_generates(kind: str) -> None:
    """Heads that are shared, compressed or repeated, windows, and layers that keep a few tokens only.

    The models are so small that a mask counts; larger ones are compared in `test_memory_prediction.py`.
    """
    config = config_of(kind)
    attention = default_attention(config)
    job = Job(
        batch=4,
        prompt=PROMPT,
        completion=COMPLETION,
        weights="bfloat16",
        autocast=False,
        optimizer="sgd",
        attention=attention,
        device="cpu",
    )
    predicted = Predictor(config).predict(job).phases["generate"].allocated_bytes
    with LiveBytes() as live, torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            config_of(kind), dtype=torch.bfloat16, attn_implementation=attention
        ).train()  # as TRL leaves it
        ids = torch.zeros(4, PROMPT, dtype=torch.long)
        mask = torch.ones_like(ids)
        mask[1, 0] = 0
        words = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        with live.phase("generate"):
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=COMPLETION, **words)
    assert predicted == pytest.approx(live.peaks["generate"], rel=0.1)


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
    config = {"model_type": "gemma2", **COMMON, **MODELS["gemma2"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "--algorithm sft --batch 2 --length 8 --no-changes"
    assert main(["plan", "--model", str(tmp_path), *words.split()]) == 0
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
