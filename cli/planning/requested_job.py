"""The job that a command line requests: options first, then the settings of a script or recipe, then TRL's
defaults.

Called by `cli/plan.py`. Traces nothing.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from grpo_run.cli.planning.sources import JobSource
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning.job import COMPLETION_TOKENS, PROMPT_TOKENS, Job

TRL_BATCH, TRL_LENGTH, TRL_VLLM_SHARE = 8, 1024, 0.3
"""TRL's defaults of `per_device_train_batch_size`, SFT's `max_length` and `vllm_gpu_memory_utilization`."""
TRL_GENERATIONS = {"grpo": 8, "rloo": 2}
"""TRL's defaults of `num_generations`."""
TRL_BETA = {"grpo": 0.0, "rloo": 0.05, "sft": 0.0}


NOT_FOR_SFT = (
    "prompt", "completion", "steps_per_generation", "num_iterations", "num_generations", "beta", "vllm_share",
    "vllm_sleep",
)  # fmt: skip
"""Options, as attributes, that say something of generation."""


def job_of(options: argparse.Namespace, source: JobSource) -> Job:
    """Return the job of a command line.

    Raises:
        ConfigError: a size is impossible, or an option is not for this algorithm.
    """
    algorithm = _algorithm(options, source)
    settings = _Settings(options, source.settings)
    accumulation = settings.given("accumulation", "gradient_accumulation_steps", 1)
    if accumulation < 1:
        raise ConfigError(f"gradient accumulation is {accumulation}, expected 1 or more")
    targets = source.lora_targets if options.lora_targets is None else _words(options.lora_targets)
    rank = source.lora_rank if options.lora_rank is None else options.lora_rank
    if options.lora_targets is not None and not rank:
        raise ConfigError("--lora-targets needs --lora-rank")
    rows = _sft_rows(settings) if algorithm == "sft" else _generated_rows(settings, algorithm, accumulation)
    return Job(
        **rows,
        batch=settings.given("batch", "per_device_train_batch_size", TRL_BATCH),
        weights=options.dtype or settings.read("dtype", "float32"),
        autocast=settings.given("bf16", "bf16", True) or settings.read("fp16", False),
        checkpointing=settings.given("gradient_checkpointing", "gradient_checkpointing", True),
        optimizer=settings.given("optim", "optim", "adamw_torch_fused"),
        accumulation=accumulation,
        ranks=options.ranks if options.ranks is not None else 1,
        layout=options.layout or "ddp",
        attention=settings.given("attention", "attention", "sdpa"),
        algorithm=algorithm,
        lora_rank=rank,
        lora_targets=targets,
        lora_dropout=source.lora_dropout if rank else 0.0,
        device=options.device or ("cpu" if settings.read("use_cpu", False) and not has_gpu() else "cuda"),
    )


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU. A script is read without it, and may ask for the CPU then."""
    return Path("/dev/nvidiactl").exists()


class _Settings:
    """Settings of a job: of options, else of a script or recipe, else TRL's defaults."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]) -> None:
        self.options, self.settings = options, settings

    def given(self, option: str, setting: str, default: Any) -> Any:
        """Return an option, or what `read` returns if it is not given."""
        given = getattr(self.options, option)
        return given if given is not None else self.read(setting, default)

    def read(self, name: str, default: Any) -> Any:
        """Return a setting of the script or recipe; None is TRL's default."""
        found = self.settings.get(name)
        return default if found is None else found


def _algorithm(options: argparse.Namespace, source: JobSource) -> str:
    """Return whose trainer runs; settings of SFT say nothing of a job that generates, and the other way
    around.
    """
    algorithm: str = options.algorithm or source.algorithm
    if (
        options.source is not None
        and algorithm != source.algorithm
        and "sft" in (algorithm, source.algorithm)
    ):
        raise ConfigError(
            f"{options.source} trains with {source.algorithm.upper()}, not with {algorithm.upper()}; leave"
            " out --algorithm"
        )
    return algorithm


def _sft_rows(settings: _Settings) -> dict[str, Any]:
    """Return the rows of SFT, which are as long as `max_length` allows."""
    for name in NOT_FOR_SFT:
        if getattr(settings.options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not for SFT, which generates nothing; its rows have --length"
                " tokens"
            )
    if settings.options.length is None and settings.settings.get("max_length", TRL_LENGTH) is None:
        raise ConfigError("max_length=None does not limit rows; give --length, the tokens of the longest row")
    return {"prompt": 0, "completion": settings.given("length", "max_length", TRL_LENGTH)}


def _generated_rows(settings: _Settings, algorithm: str, accumulation: int) -> dict[str, Any]:
    """Return how rows are generated and scored.

    Raises:
        ConfigError: a number is impossible, or an option is for SFT.
    """
    options = settings.options
    if options.length is not None:
        raise ConfigError("--length is for SFT (--algorithm sft); give --prompt and --completion")
    rollout_batches = settings.given("steps_per_generation", "steps_per_generation", accumulation)
    iterations = settings.given("num_iterations", "num_iterations", 1)
    generations = settings.given("num_generations", "num_generations", TRL_GENERATIONS[algorithm])
    if min(rollout_batches, iterations, generations) < 1:
        raise ConfigError("steps per generation, iterations and generations are 1 or more")
    vllm = settings.read("use_vllm", False)
    share = options.vllm_share
    if share is None and vllm and settings.read("vllm_mode", "colocate") == "colocate":
        share = settings.read("vllm_gpu_memory_utilization", TRL_VLLM_SHARE)
    beta = settings.given("beta", "beta", TRL_BETA[algorithm])
    if not math.isfinite(beta):
        raise ConfigError(f"beta is {beta}, expected a number")
    return {
        "prompt": settings.given("prompt", "max_prompt_length", None) or PROMPT_TOKENS,
        "completion": settings.given("completion", "max_completion_length", COMPLETION_TOKENS),
        "reference": beta != 0.0,
        "rescored": (
            algorithm == "rloo"
            or vllm
            or share is not None
            or accumulation % (rollout_batches * iterations) != 0
        ),
        "rollout_batches": rollout_batches,
        "vllm_share": share,
        "num_generations": generations,
        "gathers": settings.read("ds3_gather_for_generation", True),
        "vllm_sleeps": settings.given("vllm_sleep", "vllm_enable_sleep_mode", False),
    }


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError(f"--lora-targets {text!r}: expected names such as q_proj,v_proj")
    return words
