"""What a recipe, a YAML file of TRL's scripts, or a script says of a job, as one value; and how the files are
read.

`read_file` reads a recipe, or a configuration of TRL's own scripts (`python -m trl.scripts.grpo --config
FILE`), whose keys are those of `GRPOConfig`, `RLOOConfig` or `SFTConfig`, of `ModelConfig` and of the
scripts' arguments. Keys that decide nothing about memory are not checked; TRL does that when it starts.
`script.py` builds the value of a script. Called by `cli/plan.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream.unloaded import QUANTIZED
from grpo_run.trainers.recipes.recipe import PACKAGED, SECTIONS, find_recipe, load_recipe
from grpo_run.trainers.recipes.settings import read_settings, validation_error

_MODEL_SETTINGS = (("torch_dtype", "dtype"), ("dtype", "dtype"), ("attn_implementation", "attention"))


@dataclass(kw_only=True)
class JobSource:
    """What a script, a recipe or a configuration says.

    Attributes:
        settings: by the names of TRL's settings; `model`, `dtype` and `attention` are among them if they are
            known.
        algorithm: `grpo`, `rloo` or `sft`.
        lora_rank: of peft's `LoraConfig`; 0 without adapters.
        lora_targets: names of the modules that get adapters; empty for peft's choice.
        lora_dropout: of the adapters' inputs.
        configuration: of the model, as transformers' JSON, where a script has built it; else None.
        notes: what the user should know, a sentence each.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "grpo"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    configuration: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def take_model_settings(self, given: Mapping[Any, Any]) -> None:
        """Take the settings with which a model is loaded."""
        for name, target in _MODEL_SETTINGS:
            value = given.get(name)
            if isinstance(value, str):
                self.settings[target] = value.removeprefix("torch.")


def refuse_quantized(where: object, given: Mapping[Any, Any]) -> None:
    """Refuse settings that load quantized weights.

    Raises:
        ConfigError: one of them does, or may.
    """
    for name in QUANTIZED:
        if given.get(name):
            raise ConfigError(
                f"{where}: {name}: quantized weights are not covered by plan; give --model and --batch for"
                " the same job with weights in bfloat16 (--dtype bfloat16), which is an upper bound"
            )


TINY_MODEL = "layers=2,hidden=128,heads=4,kv-heads=2,intermediate=256,vocabulary=64"
"""Stands for the model that packaged recipes build themselves."""

UPPER_BOUND = ("use_liger_kernel", "use_liger_loss", "activation_offloading")
NOT_FOLLOWED = {
    "torch_compile": "compiled code keeps other tensors",
    "cast_lm_head_to_fp32": "it needs more",
    "deepspeed": "give --layout and --ranks",
    "fsdp": "give --layout and --ranks",
    "use_transformers_paged": "its cache is of a size of its own",
    "use_transformers_continuous_batching": "its cache is of a size of its own",
}


def read_file(source: str, algorithm: str | None = None) -> JobSource:
    """Return what a recipe, or a configuration of TRL's scripts, says.

    Args:
        source: name of a recipe, or path of a file.
        algorithm: for which script of TRL a configuration is.

    Raises:
        ConfigError: the file cannot be read, or uses what is not covered.
    """
    path = find_recipe(source)
    if path.parent != PACKAGED:
        values = read_settings(path)
        if not RECIPE_KEYS & values.keys():
            return _read_trl_file(source, values, algorithm)
    recipe = load_recipe(source)
    settings = {key: value for key, value in recipe.grpo.model_dump().items() if value is not None}
    refuse_quantized(source, settings)
    return JobSource(settings={**settings, "model": TINY_MODEL if recipe.model == "tiny" else recipe.model})


def notes_of(found: JobSource) -> Iterator[str]:
    """Yield what of a job is not followed, a sentence each."""
    for name in UPPER_BOUND:
        if found.settings.get(name):
            yield f"{name} is not covered; it needs less, so what is predicted is an upper bound."
    for name, reason in NOT_FOLLOWED.items():
        if found.settings.get(name):
            yield f"{name} is not followed: {reason}."


MODEL = "model_name_or_path"
RECIPE_KEYS = frozenset({"task", *SECTIONS})
"""Keys of recipes that no configuration of TRL has; a file without them is one."""
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
LORA_REFUSED = ("use_dora", "lora_modules_to_save", "lora_target_parameters")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _read_trl_file(path: str, values: Mapping[str, Any], algorithm: str | None) -> JobSource:
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
            f"{path} is read as a configuration of TRL's script for {source.algorithm.upper()}{why}"
            " (--algorithm names another)."
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
    """Return a value as TRL's parser takes it: YAML reads `4e-2` as text."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return float(value) if re.search(r"[.eE]", value) else int(value)


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


class _Adapters(pydantic.BaseModel):
    """The settings of adapters in `ModelConfig`, with its defaults, which are not those of `LoraConfig`."""

    model_config = pydantic.ConfigDict(strict=True)

    use_peft: bool = False
    lora_r: pydantic.PositiveInt = 16
    lora_dropout: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.05
    lora_target_modules: list[str] | str | None = None


def _read_adapters(path: str, source: JobSource) -> None:
    settings = source.settings
    try:
        adapters = _Adapters.model_validate(settings)
    except pydantic.ValidationError as invalid:
        raise validation_error(invalid, (), Path(path), ()) from None
    if not adapters.use_peft:
        if any(name in settings for name in ("lora_r", "lora_target_modules")):
            source.notes.append("It has settings of LoRA without use_peft: all weights are trained.")
        return
    for name in LORA_REFUSED:
        if settings.get(name):
            raise ConfigError(f"{path}: {name} is not covered by plan")
    targets = adapters.lora_target_modules or ()
    source.lora_rank, source.lora_dropout = adapters.lora_r, adapters.lora_dropout
    source.lora_targets = (targets,) if isinstance(targets, str) else tuple(targets)
