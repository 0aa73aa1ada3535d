"""A configuration of TRL's own scripts (`python -m trl.scripts.grpo --config FILE`), read as a job. Called by `sources.py`.

Its keys are those of `GRPOConfig`, `RLOOConfig` or `SFTConfig`, of `ModelConfig` and of the scripts' arguments. Keys that decide
nothing about memory are not checked; TRL does that when it starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from grpo_run.cli.planning.source import JobSource, refuse_quantized
from grpo_run.runtime.errors import ConfigError

MODEL = "model_name_or_path"
KNOWN_KEYS = frozenset(
    {
        MODEL,
        "dataset_name",
        "datasets",
        "reward_funcs",
        "use_peft",
        "learning_rate",
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "max_completion_length",
        "max_length",
    }
)
"""Keys of which a configuration has one. No recipe has them at its top level."""
RECIPE_KEYS = frozenset({"task", "grpo", "sft", "caps"})
"""Keys of recipes that no configuration of TRL has."""
SFT_KEYS = frozenset(
    {
        "max_length",
        "packing",
        "padding_free",
        "packing_strategy",
        "completion_only_loss",
        "assistant_only_loss",
        "dataset_text_field",
    }
)
"""Keys of `SFTConfig` that the other configurations do not have."""
LORA_RANK, LORA_DROPOUT = 16, 0.05
"""Defaults of `ModelConfig`, which are not those of `LoraConfig`."""
LORA_REFUSED = ("use_dora", "lora_modules_to_save", "lora_target_parameters")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None, "null": None}
_MAX_DIGITS = 64


def is_trl_file(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of TRL's scripts rather than a recipe."""
    return not RECIPE_KEYS & values.keys() and bool(KNOWN_KEYS & values.keys())


def read_trl_file(path: str, values: Mapping[str, Any], algorithm: str | None) -> JobSource:
    """Return what a configuration says.

    Args:
        path: of the file.
        values: its content.
        algorithm: for whose script it is; if not given, SFT's if it has keys of SFT only, else GRPO's.

    Raises:
        ConfigError: a value has another kind than its setting, or is not covered.
    """
    settings = {key: value if key == MODEL else _typed(value) for key, value in values.items()}
    sft = sorted(SFT_KEYS & settings.keys())
    source = JobSource(settings=settings, algorithm=algorithm or ("sft" if sft else "grpo"))
    why = f", since it sets {sft[0]}" if sft and algorithm is None else ""
    if algorithm is None:
        source.notes.append(
            f"{path} is read as a configuration of TRL's script for {source.algorithm.upper()}{why} (--algorithm names another)."
        )
    refuse_quantized(path, settings)
    model = settings.pop(MODEL, None)
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"{path}: {MODEL} is {model!r}, expected a name")
    source.settings["model"] = model
    source.take_model_settings(settings)
    _read_loading(path, source)
    _read_adapters(path, source)
    if settings.get("reward_model_name_or_path"):
        source.notes.append("The memory of the reward model is not counted.")
    return source


def _typed(value: Any) -> Any:
    """Return a value as TRL's parser takes it: a text that says a number or a truth value is one."""
    if not isinstance(value, str):
        return value
    if len(value) <= _MAX_DIGITS and _NUMBER.fullmatch(value):
        return float(value) if re.search(r"[.eE]", value) else int(value)
    return _WORDS.get(value.lower(), value)


def _read_loading(path: str, source: JobSource) -> None:
    """Read `model_init_kwargs`, a mapping or a text in JSON, which wins over keys of the same meaning."""
    given = source.settings.get("model_init_kwargs")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}: model_init_kwargs is no JSON") from None
    if given is None:
        return
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: model_init_kwargs is {given!r}, expected a mapping")
    refuse_quantized(f"{path}: model_init_kwargs", given)
    source.take_model_settings(given)


def _read_adapters(path: str, source: JobSource) -> None:
    settings = source.settings
    if settings.get("use_peft") is not True:
        if settings.get("use_peft"):
            raise ConfigError(f"{path}: use_peft is {settings['use_peft']!r}, expected True or False")
        if any(name in settings for name in ("lora_r", "lora_target_modules")):
            source.notes.append("It has settings of LoRA without use_peft: all weights are trained.")
        return
    for name in LORA_REFUSED:
        if settings.get(name):
            raise ConfigError(f"{path}: {name} is not covered by plan")
    rank, dropout = settings.get("lora_r", LORA_RANK), settings.get("lora_dropout", LORA_DROPOUT)
    targets = settings.get("lora_target_modules")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{path}: lora_r is {rank!r}, expected a whole number from 1 on")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ConfigError(f"{path}: lora_dropout is {dropout!r}, expected a number from 0 to below 1")
    if isinstance(targets, str):
        targets = [targets]
    if not isinstance(targets, (list, type(None))) or not all(isinstance(one, str) for one in targets or ()):
        raise ConfigError(f"{path}: lora_target_modules is {targets!r}, expected names of modules")
    source.lora_rank, source.lora_dropout = rank, float(dropout)
    source.lora_targets = tuple(targets or ())
