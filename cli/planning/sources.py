"""Read a job from a file of any supported kind, and name the settings that a prediction ignores. Called by `cli/plan.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_run.cli.planning.script import read_script
from grpo_run.cli.planning.source import JobSource, refuse_quantized
from grpo_run.cli.planning.trl_file import MODEL, RECIPE_KEYS, is_trl_file, read_trl_file
from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.recipe import PACKAGED, find_recipe, load_recipe
from grpo_run.trainers.recipes.settings import Setting, read_settings

TINY_MODEL = "layers=2,hidden=128,heads=4,kv-heads=2,intermediate=256,vocabulary=64"
"""Stands for the model that packaged recipes build themselves."""

DECIDING = (
    "per_device_train_batch_size",
    "max_completion_length",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
    "ds3_gather_for_generation",
    "num_iterations",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "activation_checkpointing",
    "optim",
    "beta",
    "use_vllm",
    "vllm_mode",
    "vllm_gpu_memory_utilization",
    "vllm_enable_sleep_mode",
    "use_liger_kernel",
    "model_init_kwargs",
    "dtype",
    "torch_dtype",
    "max_length",
    "packing",
    "padding_free",
    "lora_dropout",
)
"""Settings that a prediction depends on: if one of them cannot be read, a note says so."""
UPPER_BOUND = ("use_liger_kernel", "use_liger_loss", "activation_offloading")
NOT_FOLLOWED = {
    "torch_compile": "compiled code keeps other tensors",
    "cast_lm_head_to_fp32": "it needs more",
    "deepspeed": "give --layout and --ranks",
    "fsdp": "give --layout and --ranks",
    "use_transformers_paged": "its cache is of a size of its own",
    "use_transformers_continuous_batching": "its cache is of a size of its own",
}


def read_source(source: str, algorithm: str | None = None) -> JobSource:
    """Return what a recipe, a script, or a configuration of TRL's scripts says.

    Args:
        source: name of a recipe, or path of a file.
        algorithm: which of a script's trainers is meant, if it has several, or for which script of TRL a configuration is.

    Raises:
        ConfigError: the file cannot be read, is neither of them, or uses what is not covered.
    """
    found = read_script(Path(source), algorithm) if source.endswith(".py") else _read_yaml(source, algorithm)
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
    if unread := [name for name in dict.fromkeys(found.unread) if name in DECIDING]:
        yield f"Cannot be read from the script, which is not executed: {', '.join(unread)}; TRL's defaults are taken unless options say more."
    if again := [name for name in found.set_again if name in DECIDING]:
        yield f"Set again after the configuration is built, which is not followed: {', '.join(again)}; give options for them."
    for name in UPPER_BOUND:
        if found.settings.get(name):
            yield f"{name} is not covered; it needs less, so what is predicted is an upper bound."
    for name, reason in NOT_FOLLOWED.items():
        if found.settings.get(name):
            yield f"{name} is not followed: {reason}."
