"""What each layer of a model keeps of a token while completions are generated: its keys and values. Called by `prediction.py`.

Configurations do not say it: some models keep one head for all, some keep compressed or repeated heads, and some layers keep the last tokens
only. So a forward pass of a few tokens without data is looked at.
"""

from __future__ import annotations

from typing import Any

from grpo_run.trainers.planning.model_config import CachedLayer, with_layers
from grpo_run.trainers.planning.traces.trace import silence

TOKENS = 4
"""Fewer than any layer's window."""


def cached_layers(config: Any, traced: int) -> tuple[CachedLayer, ...]:
    """Return what the layers keep; nothing if the model has no cache of keys and values that can be looked at.

    Args:
        config: of the model.
        traced: how many layers are built. Further ones are like the last of them.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    with silence(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            model = AutoModelForCausalLM.from_config(with_layers(config, traced), dtype=torch.bfloat16).eval()
            tokens = torch.zeros(1, TOKENS, dtype=torch.long)
            cache = model.get_decoder()(input_ids=tokens, use_cache=True).past_key_values
            found = [_layer(one) for one in cache.layers]
        except Exception:  # noqa: BLE001  models of all kinds: arithmetic takes its place
            return ()
    layers = int(config.get_text_config().num_hidden_layers)
    return (*found, *found[-1:] * (layers - traced)) if len(found) == traced else ()


def _layer(layer: Any) -> CachedLayer:
    parts = [one for name in ("keys", "values") if (one := getattr(layer, name, None)) is not None]
    window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
    return CachedLayer(values=sum(one.numel() for one in parts) // TOKENS, longest=window)
