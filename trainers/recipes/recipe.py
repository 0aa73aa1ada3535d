"""What a recipe may say, and how to load one: a packaged name or a YAML file, with `--set` overrides.

Called by the launcher before it starts any process, so that bad input costs nothing, and again by every rank.
Imports neither torch nor transformers nor trl. Does not train; `__main__.py` does.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.problems import read_problems
from grpo_run.trainers.recipes.settings import Setting, apply_overrides, read_settings, refusal

PACKAGED = Path(__file__).parent
LOCAL = ("/", "./", "../", "~")
"""A name that begins so is a path, and can be looked for before anything starts."""
REWARDS = {"arithmetic": 1, "gsm8k": 2}
"""Number of reward functions of each task."""

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Nothing unknown is let through, nothing changes after loading. A key left out or null is TRL's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TrainerSection(Section):
    """Keys that `SFTConfig` and `GRPOConfig` share; their meaning and units are transformers'."""

    max_steps: PositiveInt
    per_device_train_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: Rate
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] | None = None
    warmup_steps: Count | None = None
    weight_decay: Amount | None = None
    adam_beta2: Share | None = None
    max_grad_norm: Amount | None = None
    optim: str | None = None
    bf16: bool = False
    gradient_checkpointing: bool = False
    logging_steps: PositiveInt = 1
    save_steps: PositiveInt
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    deepspeed: str | None = None
    report_to: list[str] = []

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the TRL configuration class."""
        return self.model_dump(exclude_none=True)


class SftSection(TrainerSection):
    """The warm start."""


class GrpoSection(TrainerSection):
    """The reinforcement; the meaning of the keys is that of TRL's `GRPOConfig`."""

    num_generations: Annotated[int, Field(ge=2)]
    steps_per_generation: PositiveInt | None = None
    num_iterations: PositiveInt | None = None
    max_completion_length: PositiveInt
    temperature: Rate | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: Rate | None = None
    generation_kwargs: dict[str, Any] | None = None
    beta: Amount | None = None
    epsilon: Amount | None = None
    epsilon_high: Amount | None = None
    loss_type: str | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    mask_truncated_completions: bool | None = None
    reward_weights: list[Amount] | None = None
    use_vllm: bool | None = None
    vllm_mode: Literal["colocate", "server"] | None = None
    vllm_gpu_memory_utilization: Share | None = None
    log_completions: bool | None = None


class Recipe(Section):
    """A whole recipe: what to train, on what, how, and where the results go."""

    task: Literal["arithmetic", "gsm8k"]
    model: Annotated[str, Field(min_length=1)] = "tiny"
    data: Annotated[str, Field(min_length=1)] | None = None
    output_dir: Annotated[str, Field(min_length=1)]
    seed: Count = 0
    sft: SftSection | None = None
    grpo: GrpoSection


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.stem for file in PACKAGED.glob("*.yaml"))


def setting_keys() -> list[str]:
    """Every key a recipe may hold, the nested ones dotted."""
    sections: dict[str, type[Section]] = {"sft": SftSection, "grpo": GrpoSection}
    nested = [f"{name}.{key}" for name, section in sections.items() for key in section.model_fields]
    return [*Recipe.model_fields, *nested]


def find_recipe(name_or_path: str) -> Path:
    """The file of a packaged recipe, or of the path if no packaged recipe has that name.

    Raises:
        ConfigError: there is neither; names the nearest packaged recipe.
    """
    names = packaged_recipes()
    if name_or_path in names:
        return PACKAGED / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.is_dir() and name_or_path:
        raise ConfigError(f"recipe {name_or_path!r} is a directory; name a YAML file in it")
    if path.suffix in (".yaml", ".yml") or os.sep in name_or_path:
        raise ConfigError(f"recipe file {name_or_path!r} does not exist")
    near = difflib.get_close_matches(name_or_path.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"unknown recipe {name_or_path!r}; {hint}known are {', '.join(names)}, and paths of YAML files"
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load, override and check a recipe, its local data included.

    Args:
        name_or_path: a packaged recipe's name, which goes first, or the path of a YAML file.
        overrides: `key=value` texts, keys dotted (`grpo.learning_rate=1e-5`), values YAML; later ones win.

    Raises:
        ConfigError: in one line, what is wrong, where, and what was expected.
    """
    path = find_recipe(name_or_path)
    settings = read_settings(path)
    settings = apply_overrides(settings, overrides, setting_keys())
    try:
        recipe = Recipe.model_validate(Setting.values(settings))
    except ValidationError as invalid:
        raise refusal(invalid, settings, str(path), setting_keys()) from None
    _check_together(recipe, {key: setting.origin for key, setting in settings.items()})
    return recipe


def _check_together(recipe: Recipe, origins: Mapping[str, str]) -> None:
    """What no single key can tell; `origins` says where each key was set."""
    if recipe.task == "arithmetic" and recipe.data is not None:
        raise ConfigError(f"{origins['data']}: the arithmetic task makes its own problems; leave 'data' out")
    if recipe.task == "gsm8k" and recipe.sft is not None:
        origin = next(origin for key, origin in origins.items() if key.startswith("sft"))
        raise ConfigError(f"{origin}: the gsm8k task has no warm start; leave 'sft' out")
    weights, rewards = recipe.grpo.reward_weights, REWARDS[recipe.task]
    if weights is not None and len(weights) != rewards:
        raise ConfigError(
            f"{origins['grpo.reward_weights']}: grpo.reward_weights has length {len(weights)};"
            f" rewards of the {recipe.task} task: {rewards}"
        )
    for key, text in {"model": recipe.model, "grpo.deepspeed": recipe.grpo.deepspeed}.items():
        if text is not None and text.startswith(LOCAL) and not Path(text).expanduser().exists():
            raise ConfigError(f"{origins.get(key, key)}: {key} = {text!r}, but nothing is there")
    if recipe.data is not None:
        read_problems(recipe.data)
