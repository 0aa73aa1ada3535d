"""The settings of a recipe, and how to load it: a packaged name or a YAML file, with `--set` overrides.

Called by `grpo-run train` before any process starts, so that invalid input fails at once, and again by every
rank. Imports neither torch nor transformers nor trl. Does not train; `__main__.py` does.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.launch.option import given_values
from grpo_run.trainers.recipes.problems import read_problems
from grpo_run.trainers.recipes.settings import apply_overrides, origin_of, read_settings, validation_error
from grpo_run.watchdog.observation import LEAST_LOOP_TOKENS

PACKAGED = Path(__file__).parent
PATH_PREFIXES = ("/", "./", "../", "~")
"""A name with one of these prefixes is a path, so its existence is checked before anything starts."""
TINY = "tiny"
"""The model that the recipes build themselves, and the key of the sections that replace others for it."""
REWARD_COUNTS = {"arithmetic": 1, "gsm8k": 2, "memgen-arithmetic": 1, "memgen-gsm8k": 1}
"""Number of reward functions of each task."""

UnitInterval = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are rejected, and values are immutable.

    A missing or null key is TRL's default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TrainerSection(Section):
    """Keys that `SFTConfig` and `GRPOConfig` share, with the meaning and units of `TrainingArguments`."""

    max_steps: PositiveInt
    per_device_train_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: PositiveNumber
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] | None = None
    warmup_steps: Count | None = None
    weight_decay: NonNegativeNumber | None = None
    adam_beta2: UnitInterval | None = None
    max_grad_norm: NonNegativeNumber | None = None
    optim: str | None = None
    bf16: bool = False
    gradient_checkpointing: bool = False
    logging_steps: PositiveInt = 1
    save_steps: PositiveInt
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    deepspeed: str | None = None
    report_to: list[str] = []

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the TRL configuration class."""
        return self.model_dump(exclude_none=True)


class SftSection(TrainerSection):
    """Settings of the warm start, as in TRL's `SFTConfig`."""


class GrpoSection(TrainerSection):
    """Settings of GRPO, as in TRL's `GRPOConfig`."""

    num_generations: Annotated[int, Field(ge=2)]
    steps_per_generation: PositiveInt | None = None
    num_iterations: PositiveInt | None = None
    max_completion_length: PositiveInt
    temperature: PositiveNumber | None = None
    top_p: UnitInterval | None = None
    top_k: Count | None = None
    min_p: UnitInterval | None = None
    repetition_penalty: PositiveNumber | None = None
    generation_kwargs: dict[str, Any] | None = None
    beta: NonNegativeNumber | None = None
    epsilon: NonNegativeNumber | None = None
    epsilon_high: NonNegativeNumber | None = None
    loss_type: str | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    mask_truncated_completions: bool | None = None
    reward_weights: list[NonNegativeNumber] | None = None
    use_vllm: bool | None = None
    vllm_mode: Literal["colocate", "server"] | None = None
    vllm_gpu_memory_utilization: UnitInterval | None = None
    log_completions: bool | None = None


class CapsSection(Section):
    """Caps on generation, as for `caps.apply`."""

    repetition: Annotated[int, Field(ge=LEAST_LOOP_TOKENS)] | None = None
    max_time: PositiveNumber | None = None


class MemgenSection(Section):
    """Sizes of MemGen's memory, as in `trainers.memgen.model.MemorySettings`, and its evaluation."""

    prompt_latents: PositiveInt = 16
    latents: PositiveInt = 8
    augmentations: PositiveInt = 5
    lora_rank: PositiveInt = 16
    max_length: PositiveInt = 1024
    """Tokens of a demonstration; the rest is left out."""
    evaluation_problems: PositiveInt
    """Held-out problems."""
    evaluation_batch_size: PositiveInt = 50
    """Problems that the ranks answer together, and that a kill can repeat."""


class Recipe(Section):
    """A recipe: task, model, data, settings of each trainer, and output directory."""

    task: Literal["arithmetic", "gsm8k", "memgen-arithmetic", "memgen-gsm8k"]
    model: Annotated[str, Field(min_length=1)] = TINY
    data: Annotated[str, Field(min_length=1)] | None = None
    output_dir: Annotated[str, Field(min_length=1)]
    seed: Count = 0
    guards: list[str] = []
    """Settings of `--guard`, which the command line overrides."""
    caps: CapsSection | None = None
    sft: SftSection | None = None
    weaver: SftSection | None = None
    """Training of MemGen's weaver, which `grpo`, the training of its trigger, follows."""
    memgen: MemgenSection | None = None
    grpo: GrpoSection


SECTIONS: dict[str, type[Section]] = {
    "caps": CapsSection,
    "sft": SftSection,
    "weaver": SftSection,
    "memgen": MemgenSection,
    "grpo": GrpoSection,
}
"""By key of a recipe."""


def packaged_recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(file.stem for file in PACKAGED.glob("*.yaml"))


def setting_keys() -> list[str]:
    """Return every key that a recipe may contain, with nested keys dotted."""
    nested = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
    return [*Recipe.model_fields, *nested]


def find_recipe(name_or_path: str) -> Path:
    """Return the file of a packaged recipe, or the given path if no packaged recipe has that name.

    Raises:
        ConfigError: there is neither.
    """
    names = packaged_recipes()
    if name_or_path in names:
        return PACKAGED / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.is_dir() and name_or_path:
        raise ConfigError(f"recipe {name_or_path!r} is a directory; give the path of a YAML file")
    if path.suffix in (".yaml", ".yml") or os.sep in name_or_path:
        raise ConfigError(f"recipe file {name_or_path!r} does not exist")
    near = difflib.get_close_matches(name_or_path.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"unknown recipe {name_or_path!r}; {hint}available: {', '.join(names)}, or the path of a YAML file"
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe, apply the overrides and validate it, including its local data.

    Args:
        name_or_path: the name of a packaged recipe, which takes precedence, or the path of a YAML file.
        overrides: texts of the form `key=value`, with dotted keys (`grpo.learning_rate=1e-5`). Later ones
            win.

    Raises:
        ConfigError: a setting is invalid; the one-line message says which, where it is set, and what is
            expected.
    """
    path = find_recipe(name_or_path)
    packaged = read_settings(path)
    tiny = packaged.pop(TINY, None)
    settings = apply_overrides(packaged, overrides, setting_keys())
    if settings.get("model") == TINY and isinstance(tiny, dict):
        settings = apply_overrides({**packaged, **tiny}, overrides, setting_keys())
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as invalid:
        raise validation_error(invalid, overrides, path, setting_keys()) from None
    _check_combinations(recipe, lambda key: origin_of(key, overrides, path))
    return recipe


def _check_combinations(recipe: Recipe, origin: Callable[[str], str]) -> None:
    """Check what depends on several keys.

    Args:
        origin: returns where a key was set.
    """
    if recipe.task.endswith("arithmetic") and recipe.data is not None:
        raise ConfigError(f"{origin('data')}: the {recipe.task} task generates its own data; remove 'data'")
    if recipe.task.endswith("gsm8k") and recipe.sft is not None and recipe.model != TINY:
        raise ConfigError(
            f"{origin('sft')}: {recipe.task} has a warm start for model: tiny only; remove 'sft'"
        )
    for key in ("weaver", "memgen"):
        if (getattr(recipe, key) is None) == recipe.task.startswith("memgen"):
            problem = "needs" if recipe.task.startswith("memgen") else "has no"
            raise ConfigError(f"{origin(key)}: the {recipe.task} task {problem} section {key!r}")
    try:
        for settings in feature_settings():
            given_values(settings, {"--guard": recipe.guards})
    except ConfigError as error:
        raise ConfigError(f"{origin('guards')}: {error}") from None
    weights, rewards = recipe.grpo.reward_weights, REWARD_COUNTS[recipe.task]
    if weights is not None and len(weights) != rewards:
        raise ConfigError(
            f"{origin('grpo.reward_weights')}: grpo.reward_weights has length {len(weights)},"
            f" expected {rewards}: one weight per reward function of the {recipe.task} task"
        )
    for key, text in {"model": recipe.model, "grpo.deepspeed": recipe.grpo.deepspeed}.items():
        if text is not None and text.startswith(PATH_PREFIXES) and not Path(text).expanduser().exists():
            raise ConfigError(f"{origin(key)}: {key} = {text!r} does not exist")
    if recipe.data is not None:
        read_problems(recipe.data)
