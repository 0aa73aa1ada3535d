"""A recipe: a packaged name or a YAML file, with `--set` overrides.

The sections `sft`, `weaver` and `grpo` are configurations of TRL and transformers. TRL's parser reads them
(`training.py`, in the ranks, and before that in the process that `grpo-run train` starts to check them). This
module reads the rest: it is called by `grpo-run train`, by `grpo-run plan`, and by every rank, and imports
neither torch nor transformers nor trl.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.launch.option import given_values
from grpo_run.trainers.memory_settings import MemorySettings
from grpo_run.trainers.recipes.problems import read_problems
from grpo_run.watchdog.observation import LEAST_LOOP_TOKENS

PACKAGED = Path(__file__).parent
MAX_FILE_BYTES = 1 << 20
PATH_PREFIXES = ("/", "./", "../", "~")
"""A name with one of these prefixes is a path, so its existence is checked before anything starts."""
TINY = "tiny"
"""The model that the recipes build themselves, and the key of the sections that replace others for it."""
DEFAULTS = {
    "gradient_accumulation_steps": 1, "logging_steps": 1, "save_total_limit": 2, "report_to": "none",
    "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
"""Of the sections that TRL reads, where they differ from TRL's own."""
TRL_SECTIONS = ("sft", "weaver", "grpo")

PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: unknown keys are rejected, and values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), coerce_numbers_to_str=True
    )


class CapsSection(Section):
    """Caps on generation, as for `caps.apply`."""

    repetition: Annotated[int, Field(ge=LEAST_LOOP_TOKENS)] | None = None
    max_time: PositiveNumber | None = None


class MemgenSection(Section, MemorySettings):  # type: ignore[misc]  # pydantic freezes it
    """Sizes of MemGen's memory, and its evaluation."""

    max_length: PositiveInt = 1024
    """Tokens of a demonstration; the rest is left out."""
    evaluation_problems: PositiveInt | None = None
    """The first held-out problems; all by default."""
    evaluation_batch_size: PositiveInt = 50
    """Problems that the ranks answer together, and that a kill can repeat."""


class Recipe(Section):
    """A recipe: task, model, data, settings of each trainer, and output directory."""

    task: Literal["arithmetic", "gsm8k", "memgen-arithmetic", "memgen-gsm8k"]
    model: Annotated[str, Field(min_length=1)] = TINY
    data: Annotated[str, Field(min_length=1)] | None = None
    output_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0)] = 0
    guards: list[str] = []
    """Settings of `--guard`, which the command line overrides."""
    caps: CapsSection | None = None
    memgen: MemgenSection | None = None
    sft: dict[str, Any] | None = None
    """Of the warm start: `trl.SFTConfig`."""
    weaver: dict[str, Any] | None = None
    """Of MemGen's weaver, which `grpo`, the training of its trigger, follows: `TrainingArguments`."""
    grpo: dict[str, Any]
    """`trl.GRPOConfig`."""


def packaged_recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(file.stem for file in PACKAGED.glob("*.yaml"))


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
    hint = nearest(name_or_path.lower(), names)
    raise ConfigError(
        f"unknown recipe {name_or_path!r}{hint}; available: {', '.join(names)}, or the path of a YAML file"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint with the known word that is nearest, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: the file cannot be read, is too large, is not valid YAML, or is not a mapping.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {str(path)!r}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_FILE_BYTES} bytes, so it is not a recipe")
    found = _parsed(content, str(path))
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    return found


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe, apply the overrides and validate it, including its local data.

    Args:
        name_or_path: the name of a packaged recipe, which takes precedence, or the path of a YAML file.
        overrides: texts of the form `key=value`, with dotted keys (`grpo.learning_rate=1e-5`) and values in
            YAML. Later ones win.

    Raises:
        ConfigError: a setting is invalid; the one-line message says which, and what is expected.
    """
    path = find_recipe(name_or_path)
    settings = read_settings(path)
    tiny = settings.pop(TINY, None)
    given = [_override(text) for text in overrides]
    if dict([("model", settings.get("model")), *given])["model"] == TINY:
        settings |= tiny or {}
    for key, value in given:
        section, _, inner = key.rpartition(".")
        settings[section or key] = {**(settings.get(section) or {}), inner: value} if section else value
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as invalid:
        error = min(invalid.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            hint = nearest(key, Recipe.model_fields)
            raise ConfigError(f"recipe {name_or_path}: unknown key {key!r}{hint}") from None
        found = "" if error["type"] == "missing" else f", found {str(error['input'])[:80]!r}"
        raise ConfigError(f"recipe {name_or_path}: {key}: {error['msg']}{found}") from None
    try:
        _check_combinations(recipe)
    except ConfigError as error:
        raise ConfigError(f"recipe {name_or_path}: {error}") from None
    return recipe


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: expected key=value")
    return key.strip(), _parsed(value, f"--set {text[:80]!r}")


def _parsed(content: str | bytes, origin: str) -> Any:
    try:
        return yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{origin}{place}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: invalid YAML: {' '.join(str(error).split())}") from None


def _check_combinations(recipe: Recipe) -> None:
    """Check what depends on several keys, and what no parser checks."""
    if recipe.task.endswith("arithmetic") and recipe.data is not None:
        raise ConfigError(f"the {recipe.task} task generates its own data; remove 'data'")
    if recipe.task.endswith("gsm8k") and recipe.sft is not None and recipe.model != TINY:
        raise ConfigError(f"{recipe.task} has a warm start for model: tiny only; remove 'sft'")
    for key in ("weaver", "memgen"):
        if (getattr(recipe, key) is None) == recipe.task.startswith("memgen"):
            problem = "needs" if recipe.task.startswith("memgen") else "has no"
            raise ConfigError(f"the {recipe.task} task {problem} section {key!r}")
    for settings in feature_settings():
        given_values(settings, {"--guard": recipe.guards})
    if recipe.model.startswith(PATH_PREFIXES) and not Path(recipe.model).expanduser().exists():
        raise ConfigError(f"model = {recipe.model!r} does not exist")
    if recipe.data is not None:
        read_problems(recipe.data)
