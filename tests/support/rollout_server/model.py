"""A Llama or Qwen2 of transformers in numpy: log-probabilities and samples of tiny models.

With torch, a server would take seconds to start. The names of the weights are those of transformers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Weights = dict[str, Any]
"""Arrays of float32 by name."""
CONFIGURATION: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 43, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0}, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""That of the model of `tests/scripts/tiny.py`."""


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt; `logprobs` has those of each token and of the most probable ones."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    finish_reason: str


def write(folder: Path) -> Path:
    """Write a model of the shape of the tests' model with random weights, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    size, inner, vocabulary = (
        CONFIGURATION[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, size), "lm_head.weight": (vocabulary, size),
        "model.norm.weight": (size,),
    }  # fmt: skip
    for layer in range(CONFIGURATION["num_hidden_layers"]):
        inside = {
            "self_attn.q_proj.weight": (size, size), "self_attn.q_proj.bias": (size,),
            "self_attn.k_proj.weight": (size // 2, size), "self_attn.k_proj.bias": (size // 2,),
            "self_attn.v_proj.weight": (size // 2, size), "self_attn.v_proj.bias": (size // 2,),
            "self_attn.o_proj.weight": (size, size), "mlp.gate_proj.weight": (inner, size),
            "mlp.up_proj.weight": (inner, size), "mlp.down_proj.weight": (size, inner),
            "input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    source = np.random.default_rng(29)
    weights = {
        name: (source.normal(0, 0.3, shape) + name.endswith("norm.weight")).astype(np.float32)
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    save_file(weights, folder / "model.safetensors")
    return folder


def read(folder: Path) -> tuple[dict[str, Any], Weights]:
    """Return configuration and weights of a model that `save_pretrained` or `write` has written."""
    weights = load_file(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), {
        name: one.astype(np.float32) for name, one in weights.items()
    }


def digest(weights: Weights) -> str:
    """Return what `tiny.digest` returns for the same weights in float32."""
    total = hashlib.sha256()
    for name in sorted(weights):
        shape = tuple(map(int, weights[name].shape))
        total.update(f"{name} torch.float32 {shape}\n".encode())
        total.update(weights[name].tobytes())
    return total.hexdigest()


def logprobs(configuration: dict[str, Any], weights: Weights, tokens: Any, temperature: float) -> Any:
    """Return the log-probabilities of what follows each token, in float64: rows, positions, vocabulary."""
    heads = configuration["num_attention_heads"]
    groups = heads // configuration["num_key_value_heads"]
    epsilon = np.float32(configuration["rms_norm_eps"])
    rows, length = tokens.shape
    width = configuration["hidden_size"] // heads
    rotary = configuration.get("rope_parameters") or configuration
    angles = np.outer(np.arange(length), rotary["rope_theta"] ** (-np.arange(0, width, 2) / width))
    cosine, sine = (np.tile(one, 2).astype(np.float32) for one in (np.cos(angles), np.sin(angles)))
    mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def linear(x: Any, name: str) -> Any:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(x: Any, name: str) -> Any:
        return weights[f"{name}.weight"] * (x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon))

    def split(x: Any) -> Any:
        return x.reshape(rows, length, -1, width).swapaxes(1, 2)

    def turn(x: Any) -> Any:
        half = width // 2
        return x * cosine + np.concatenate([-x[..., half:], x[..., :half]], -1) * sine

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(configuration["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (split(linear(h, f"{name}.self_attn.{part}_proj")) for part in "qkv")
        k, v = np.repeat(turn(k), groups, 1), np.repeat(v, groups, 1)
        scores = turn(q) @ k.swapaxes(2, 3) / np.float32(width**0.5) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        h = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(rows, length, -1)
        x = x + linear(h, f"{name}.self_attn.o_proj")
        h = norm(x, f"{name}.post_attention_layernorm")
        gate = linear(h, f"{name}.mlp.gate_proj")
        h = gate / (1 + np.exp(-gate)) * linear(h, f"{name}.mlp.up_proj")
        x = x + linear(h, f"{name}.mlp.down_proj")
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    logits = linear(norm(x, "model.norm"), head).astype(np.float64) / (temperature or 1.0)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def best(row: Any, chosen: int, count: int) -> dict[int, float]:
    """Return the log-probability of a token, and those of the `count` most probable ones, best first."""
    top = np.argsort(-row, kind="stable")[:count] if count else ()
    return {int(token): float(row[token]) for token in (chosen, *top)}


def ranked(row: Any, chosen: int, count: int) -> dict[int, tuple[float, int]]:
    """Return the same with the ranks of the tokens, from 1."""
    return {token: (value, 1 + int((row > value).sum())) for token, value in best(row, chosen, count).items()}


def sample(
    configuration: dict[str, Any], weights: Weights, prompt: list[int], *, count: int, temperature: float,
    longest: int, seed: int, top: int,
) -> list[Completion]:  # fmt: skip
    """Return completions of a prompt, which depend on these arguments only: a later server gives the same."""
    sources = [np.random.default_rng([seed % 2**64, index, *prompt]) for index in range(count)]
    made = [Completion([], [], "length") for _ in range(count)]
    tokens = np.array([prompt] * count)
    for _ in range(longest):
        rows = logprobs(configuration, weights, tokens, temperature)[:, -1]
        chosen = [
            min(int(np.searchsorted(np.exp(row).cumsum(), source.random())), len(row) - 1)
            if temperature else int(row.argmax())
            for row, source in zip(rows, sources, strict=True)
        ]  # fmt: skip
        for index, token in enumerate(chosen):
            if made[index].finish_reason == "length":
                made[index].tokens.append(token)
                made[index].logprobs.append(best(rows[index], token, top))
                if token == configuration["eos_token_id"]:
                    made[index] = Completion(made[index].tokens, made[index].logprobs, "stop")
        if all(one.finish_reason == "stop" for one in made):
            break
        tokens = np.concatenate([tokens, np.array(chosen)[:, None]], 1)
    return made
