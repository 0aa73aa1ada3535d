"""The settings of a job that a file gives, as one value, and what is refused in all kinds of files.

Built by `script.py`, `trl_file.py` and `sources.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream.unloaded import QUANTIZED

_MODEL_SETTINGS = (("torch_dtype", "dtype"), ("dtype", "dtype"), ("attn_implementation", "attention"))


@dataclass(kw_only=True)
class JobSource:
    """What a script, a recipe or a configuration says.

    Attributes:
        settings: by the names of TRL's settings; `model`, `dtype` and `attention` are among them if they are known.
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
                f"{where}: {name}: quantized weights are not covered by plan; give --model and --batch for the"
                " same job with weights in bfloat16 (--dtype bfloat16), which is an upper bound"
            )
