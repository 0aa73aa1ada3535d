"""What a recipe or a script says of a job, by the names of TRL's settings. Called by `plan.py`.

A script is read as syntax and not executed: only values that are written out as literals are found.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.recipe import load_recipe

CONFIGURATION = "GRPOConfig"
TRAINER = "GRPOTrainer"
MAX_SCRIPT_BYTES = 1 << 20


def read_source(source: str) -> dict[str, Any]:
    """Return the settings of a recipe or script; `model` is among them if it is known.

    Raises:
        ConfigError: the file cannot be read, or is neither.
    """
    if source.endswith(".py"):
        return _read_script(Path(source))
    recipe = load_recipe(source)
    settings = {key: value for key, value in recipe.grpo.model_dump().items() if value is not None}
    if recipe.model != "tiny":
        settings["model"] = recipe.model
    return settings


def _read_script(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_SCRIPT_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_SCRIPT_BYTES} bytes")
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no Python script: {error}") from None
    settings: dict[str, Any] = {}
    used = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in (CONFIGURATION, TRAINER):
            used = True
            names = {"model"} if name == TRAINER else None
            settings.update(_literals(node, names))
    if not used:
        raise ConfigError(
            f"{path} calls neither {CONFIGURATION} nor {TRAINER}; give --model and --batch instead"
        )
    return settings


def _literals(call: ast.Call, names: set[str] | None) -> dict[str, Any]:
    found = {}
    for keyword in call.keywords:
        if keyword.arg is None or (names is not None and keyword.arg not in names):
            continue
        if isinstance(keyword.value, ast.Constant):
            found[keyword.arg] = keyword.value.value
    return found
