"""What a recipe or a script says of a job, as one value; and for which of TRL's scripts a YAML file is.

A YAML file that is no recipe is a configuration of one of TRL's own scripts (`python -m trl.scripts.grpo
--config FILE`), which runs as a user's script does: `script.py` builds the value of a script. Called by
`cli/plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_run.trainers.recipes.recipe import DEFAULTS, PACKAGED, TRL_SECTIONS, load_recipe, read_settings


@dataclass(kw_only=True)
class JobSource:
    """What a script or a recipe says.

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


TINY_MODEL = "layers=2,hidden=128,heads=4,kv-heads=2,intermediate=256,vocabulary=64"
"""Stands for the model that packaged recipes build themselves."""

UPPER_BOUND = ("use_liger_loss", "activation_offloading")
NOT_FOLLOWED = {
    "cast_lm_head_to_fp32": "it needs more",
    "deepspeed": "give --layout and --ranks",
    "fsdp": "give --layout and --ranks",
    "use_transformers_paged": "its cache is of a size of its own",
    "use_transformers_continuous_batching": "its cache is of a size of its own",
}
RECIPE_KEYS = frozenset({"task", "caps", "memgen", *TRL_SECTIONS})
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


def trl_algorithm(path: Path, given: str | None) -> str | None:
    """Return for which of TRL's scripts a YAML file is: `grpo`, `rloo` or `sft`; None for a recipe.

    Args:
        path: of the file.
        given: what the user says; else SFT's if the file has keys of SFT only, else GRPO's.

    Raises:
        ConfigError: the file cannot be read.
    """
    keys = {"task"} if path.parent == PACKAGED else read_settings(path).keys()
    if RECIPE_KEYS & keys:
        return None
    return given or ("sft" if SFT_KEYS & keys else "grpo")


def read_recipe(name_or_path: str) -> JobSource:
    """Return what a recipe says.

    Raises:
        ConfigError: it is not valid.
    """
    recipe = load_recipe(name_or_path)
    return JobSource(
        settings={**DEFAULTS, **recipe.grpo, "model": TINY_MODEL if recipe.model == "tiny" else recipe.model}
    )


def notes_of(found: JobSource) -> Iterator[str]:
    """Yield what of a job is not followed, a sentence each."""
    for name in UPPER_BOUND:
        if found.settings.get(name):
            yield f"{name} is not covered; it needs less, so what is predicted is an upper bound."
    for name, reason in NOT_FOLLOWED.items():
        if found.settings.get(name):
            yield f"{name} is not followed: {reason}."
