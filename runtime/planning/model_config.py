"""The model of a job: its configuration from a local folder, the local cache of the Hub, or sizes given as
words.

Called by `cli.planning`. Loads no weights and asks no server.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream import memory_names

SIZE_WORDS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv-heads": "num_key_value_heads", "intermediate": "intermediate_size", "vocabulary": "vocab_size",
    "positions": "max_position_embeddings", "tied": "tie_word_embeddings",
}  # fmt: skip
"""Words of a shape, and transformers' attributes for them."""
DEFAULT_TYPE = "qwen2"
MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 11
"""Above any published model; every layer is built, without data."""
MAX_PARAMETERS = 10**13


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model that terms and limits depend on."""

    layers: int
    hidden: int
    vocabulary: int
    positions: int | None
    parameters: int


def load_model_config(name: str) -> Any:
    """Return transformers' configuration of a model.

    Args:
        name: a folder with `config.json`, that file, a repository in the local cache of the Hub, or a shape
            such as `type=gpt2,layers=12,hidden=768,heads=12,vocabulary=50257`.

    Raises:
        ConfigError: there is no such model here, or its configuration cannot be used.
    """
    path = os.path.expanduser(name)
    if "=" in name and not os.path.exists(path):
        return _from_words(name)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001  transformers raises many kinds
        missing = "it is no folder with config.json, and not in the local cache of the Hub"
        why = _short(error) if os.path.exists(path) else missing
        raise ConfigError(
            f"model {name[:200]!r} cannot be read: {why}; give such a folder or repository, or a shape such"
            " as layers=24,hidden=896,heads=14,kv-heads=2,intermediate=4864,vocabulary=151936"
        ) from None
    return _checked(config, f"model {name!r}")


def shape_of(config: Any) -> Shape:
    """Return the sizes of a configuration, and count its parameters without allocating them.

    Raises:
        ConfigError: no causal language model can be built from it.
    """
    text = config.get_text_config()
    return Shape(
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
        parameters=count_parameters(config),
    )


def count_parameters(config: Any) -> int:
    """Return how many parameters a model has; tied weights count once.

    Raises:
        ConfigError: no causal language model can be built from the configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001  whatever the model's own code raises for impossible sizes
        said = f"no causal language model can be built from this configuration: {_short(error)}"
        raise ConfigError(said) from None
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"models with recurrent layers, such as {config.model_type}, are not covered by plan: what they"
            " keep depends on kernels that cannot be traced"
        )
    count = int(sum(parameter.numel() for parameter in model.parameters()))
    if count > MAX_PARAMETERS:
        raise ConfigError(f"the model has {count:.1e} parameters, expected at most {MAX_PARAMETERS:.0e}")
    return count


def default_attention(config: Any) -> str:
    """Return the implementation of attention that transformers chooses for a model: stored matrices where it
    has no other.
    """
    found = memory_names.model_classes(config)
    kinds = found if isinstance(found, (list, tuple)) else (found,)
    return "sdpa" if all(getattr(kind, "_supports_sdpa", True) for kind in kinds) else "eager"


def with_layers(config: Any, layers: int) -> Any:
    """Return a copy of a configuration with fewer layers; lists of one entry per layer are cut."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    before = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return changed


def layers_are_alike(config: Any) -> bool:
    """Whether the configuration says the same of every layer, as far as lists of one entry per layer tell."""
    text = config.get_text_config()
    lists = (value for value in vars(text).values() if isinstance(value, list))
    return all(
        len(value) != text.num_hidden_layers or all(one == value[0] for one in value) for value in lists
    )


def _short(error: Exception) -> str:
    """Return the beginning of another library's message, in one line."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def _from_words(text: str) -> Any:
    values: dict[str, Any] = {"model_type": DEFAULT_TYPE}
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        if key == "type":
            values["model_type"] = value
        elif key == "tied":
            if value not in ("yes", "no"):
                raise ConfigError(f"shape {text!r}: tied is {value!r}, expected yes or no")
            values[SIZE_WORDS[key]] = value == "yes"
        elif key in SIZE_WORDS:
            if not (value.isascii() and value.isdecimal()) or not 1 <= int(value[:20]) <= MAX_SIZE:
                raise ConfigError(
                    f"shape {text!r}: {key} is {value!r}, expected a whole number from 1 to {MAX_SIZE}"
                )
            values[SIZE_WORDS[key]] = int(value)
        else:
            raise ConfigError(f"shape {text!r}: unknown word {key!r}; known: type, {', '.join(SIZE_WORDS)}")
    for word in ("layers", "hidden", "heads", "vocabulary"):
        if SIZE_WORDS[word] not in values:
            raise ConfigError(f"shape {text!r}: {word} is missing")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("intermediate_size", 4 * values["hidden_size"])
    return build_config(values, f"shape {text!r}")


def build_config(values: Mapping[str, Any], origin: str) -> Any:
    """Return transformers' configuration of JSON values.

    Args:
        values: with `model_type`.
        origin: names them in an error.

    Raises:
        ConfigError: transformers has no such model, or a size is impossible.
    """
    from transformers import AutoConfig

    _check_layers(values.get("num_hidden_layers", 1), origin)  # some configurations make a list of them
    rest = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(values["model_type"], **rest)
    except Exception as error:  # noqa: BLE001  validation errors of many libraries
        raise ConfigError(f"{origin}: {_short(error)}") from None
    return _checked(config, origin)


def _checked(config: Any, origin: str) -> Any:
    """Return a configuration whose sizes are possible and whose model is covered."""
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise ConfigError(f"{origin}: models with images or sound are not covered by plan")
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{origin}: quantized weights are not covered by plan; take the model that it was made from"
        )
    _check_layers(getattr(config.get_text_config(), "num_hidden_layers", None), origin)
    return config


def _check_layers(layers: Any, origin: str) -> None:
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise ConfigError(
            f"{origin}: num_hidden_layers is {layers!r}, expected a whole number from 1 to {MAX_LAYERS}"
        )
