"""The model of a job: its configuration from a local folder, the local cache of the Hub, or sizes given as
words.

Called by `cli.planning`. Loads no weights and asks no server.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream import memory_names

MAX_CONFIG_BYTES = 1 << 20
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
MAX_NAME = 1024
"""Characters of a model's name; longer ones are no paths on Linux either."""
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
    if len(name) > MAX_NAME or "\0" in name:
        raise ConfigError(
            f"model {name[:40]!r}...: expected a name of up to {MAX_NAME} characters, none of them NUL"
        )
    if "=" in name and not Path(name).exists():
        return _from_words(name)
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path)
    if path.name == "config.json" or name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"model {name!r}: {path} does not exist")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # noqa: BLE001  transformers raises many kinds for a name that it cannot find
        raise ConfigError(
            f"model {name!r} is neither a folder with config.json nor in the local cache of the Hub; give a"
            " folder, or a shape such as"
            " layers=24,hidden=896,heads=14,kv-heads=2,intermediate=4864,vocabulary=151936"
            f" ({type(error).__name__})"
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
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"no causal language model can be built from this configuration: {text}") from None
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


def _from_file(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_CONFIG_BYTES} bytes, so it is no model configuration"
            )
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"{path} has no 'model_type', so it is no model configuration of transformers")
    return build_config(values, str(path))


def _from_words(text: str) -> Any:
    values: dict[str, Any] = {"model_type": DEFAULT_TYPE}
    given: set[str] = set()
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        if key in given:
            raise ConfigError(f"shape {text!r}: {key} is given twice")
        given.add(key)
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
    if values["hidden_size"] % values["num_attention_heads"]:
        raise ConfigError(f"shape {text!r}: hidden is not a multiple of heads")
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

    layers = values.get("num_hidden_layers", 1)
    if isinstance(layers, int) and layers > MAX_LAYERS:  # some configurations make a list of them
        raise ConfigError(
            f"{origin}: num_hidden_layers is {layers}, expected a whole number from 1 to {MAX_LAYERS}"
        )
    rest = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(values["model_type"], **rest)
    except Exception as error:  # noqa: BLE001  validation errors of many libraries
        raise ConfigError(f"{origin}: {' '.join(str(error).split())[:200]}") from None
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
    text = config.get_text_config()
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"):
        size = getattr(text, key, None)
        if key == "num_attention_heads" and size is None:  # models without attention
            continue
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise ConfigError(f"{origin}: {key} is {size!r}, expected a whole number from 1 to {most}")
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < 1:
        raise ConfigError(f"{origin}: max_position_embeddings is {positions}, expected 1 or more")
    return config
