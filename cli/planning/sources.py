"""What a recipe or a script says of a job, and what of it a prediction does not follow. Called by `plan.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_run.cli.planning.scripts import QUANTIZED, Source, read_script
from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.recipe import load_recipe

DECIDING = (
    "per_device_train_batch_size",
    "max_completion_length",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "bf16",
    "fp16",
    "gradient_checkpointing",
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


def read_source(source: str) -> Source:
    """Return what a recipe or script says.

    Raises:
        ConfigError: the file cannot be read, is neither, or uses what is not covered.
    """
    if source.endswith(".py"):
        found = read_script(Path(source))
    else:
        recipe = load_recipe(source)
        found = Source(
            settings={key: value for key, value in recipe.grpo.model_dump().items() if value is not None}
        )
        if recipe.model != "tiny":
            found.settings["model"] = recipe.model
    if any(found.settings.get(name) for name in QUANTIZED):
        raise ConfigError(f"{source}: quantized weights are not covered by plan")
    found.notes += _notes(found)
    return found


def _notes(found: Source) -> Iterator[str]:
    if unread := [name for name in dict.fromkeys(found.unread) if name in DECIDING]:
        yield f"Given by expressions, which are not executed: {', '.join(unread)}; TRL's defaults are taken unless options say more."
    for name in UPPER_BOUND:
        if found.settings.get(name):
            yield f"{name} is not covered; it needs less, so what is predicted is an upper bound."
    for name, reason in NOT_FOLLOWED.items():
        if found.settings.get(name):
            yield f"{name} is not followed: {reason}."
