"""Read a job from a file of any supported kind, and name the settings that a prediction ignores. Called by `cli/plan.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_run.cli.planning.script import read_script
from grpo_run.cli.planning.source import JobSource, refuse_quantized
from grpo_run.cli.planning.trl_file import MODEL, RECIPE_KEYS, is_trl_file, read_trl_file
from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.recipe import PACKAGED, find_recipe, load_recipe
from grpo_run.trainers.recipes.settings import Setting, read_settings

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


def is_script(source: str) -> bool:
    """Whether a source is a script rather than a recipe or a configuration."""
    return source.endswith(".py")


def read_source(
    source: str, algorithm: str | None = None, *, arguments: Sequence[str] = (), ranks: int = 1
) -> JobSource:
    """Return what a recipe, a script, or a configuration of TRL's scripts says.

    Args:
        source: name of a recipe, or path of a file.
        algorithm: for which script of TRL a configuration is.
        arguments: of a script's command line.
        ranks: that a script sees.

    Raises:
        ConfigError: the file cannot be read, is neither of them, or uses what is not covered.
    """
    if is_script(source):
        found = read_script(Path(source), arguments, ranks)
    elif arguments:
        raise ConfigError(f"{source} is no script, so it takes no arguments after --")
    else:
        found = _read_yaml(source, algorithm)
    refuse_quantized(source, found.settings)
    found.notes += _notes(found)
    return found


def _read_yaml(source: str, algorithm: str | None) -> JobSource:
    path = find_recipe(source)
    if path.parent != PACKAGED:
        values = Setting.values(read_settings(path))
        if is_trl_file(values):
            return read_trl_file(source, values, algorithm)
        if not RECIPE_KEYS & values.keys():
            raise ConfigError(
                f"{source} is no recipe (it has no 'task') and no configuration of TRL's scripts (it has no {MODEL!r})"
            )
    recipe = load_recipe(source)
    settings = {key: value for key, value in recipe.grpo.model_dump().items() if value is not None}
    return JobSource(settings={**settings, "model": TINY_MODEL if recipe.model == "tiny" else recipe.model})


def _notes(found: JobSource) -> Iterator[str]:
    for name in UPPER_BOUND:
        if found.settings.get(name):
            yield f"{name} is not covered; it needs less, so what is predicted is an upper bound."
    for name, reason in NOT_FOLLOWED.items():
        if found.settings.get(name):
            yield f"{name} is not followed: {reason}."
