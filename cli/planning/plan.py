"""`grpo-run plan`: predict the memory of a GRPO job, say what fits and which changes need less.

Parses, reads the recipe or script, asks `trainers.planning`, and prints a table or JSON. Starts no process and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from grpo_run.cli.planning.as_json import as_json
from grpo_run.cli.planning.options import build_parser, parse_size
from grpo_run.cli.planning.output import print_plan
from grpo_run.cli.planning.plot import check_path, write_plot
from grpo_run.cli.planning.report import Report
from grpo_run.cli.planning.scripts import Source
from grpo_run.cli.planning.sources import read_source
from grpo_run.cli.text.paragraph import print_paragraph
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.trainers.planning.job import MAX_TOKENS, Job

DEFAULT_PROMPT = 256
"""Tokens; no setting of TRL says how long prompts are."""
TRL_BATCH, TRL_COMPLETION, TRL_VLLM_SHARE = 8, 512, 0.3
"""TRL's defaults of `per_device_train_batch_size`, `max_completion_length` and `vllm_gpu_memory_utilization`."""
TRL_BETA = {"grpo": 0.0, "rloo": 0.05}
_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a name"}
TINY_MODEL = "layers=2,hidden=128,heads=4,kv-heads=2,intermediate=256,vocabulary=64"
"""Stands for the model that packaged recipes build themselves."""


def main(arguments: Sequence[str]) -> int:
    """Predict and print; returns the exit code."""
    options = build_parser().parse_args(arguments)
    gpu_bytes = None if options.gpu is None else parse_size("--gpu", options.gpu)
    observed = None if options.explain is None else parse_size("--explain", options.explain)
    if options.pad_to is not None and not 1 <= options.pad_to <= MAX_TOKENS:
        raise UsageError(f"--pad-to is {options.pad_to}, expected 1 to {MAX_TOKENS}")
    source = Source() if options.source is None else read_source(options.source)
    model = options.model or source.settings.get("model")
    if not isinstance(model, str):
        if options.source is None or options.source.endswith(".py"):
            raise UsageError("plan needs --model: a folder with config.json, a cached repository, or a shape")
        model = TINY_MODEL
    if source.settings.get("dtype") == "auto" and options.dtype is None:
        source.settings["dtype"] = _saved_dtype(model)
    job = job_of(options, source)
    if job.vllm_share is not None and gpu_bytes is None:
        raise UsageError("--vllm-share is a share of the GPU; give --gpu SIZE too")
    if options.preset is not None:
        _check_preset(options, observed)
    if options.plot is not None:
        check_path(options.plot)
        if observed is not None:
            raise UsageError("--plot draws a prediction; leave out --explain")
    if observed is None:
        return _plan(options, model, job, gpu_bytes, source.notes)
    return _explain(options, model, job, observed, source.notes)


def _check_preset(options: argparse.Namespace, observed: int | None) -> None:
    if options.gpu is None:
        raise UsageError("--preset needs --gpu SIZE, the memory that it is for")
    if observed is not None:
        raise UsageError("--preset and --explain ask two questions; give one of them")
    for option in ("batch", "accumulation", "steps_per_generation", "gradient_checkpointing"):
        if getattr(options, option) is not None:
            raise UsageError(f"--preset chooses what --{option.replace('_', '-')} says; give one of them")


def _saved_dtype(model: str) -> str:
    """Return the type in which weights are saved, which transformers keeps unless it is told another."""
    from grpo_run.trainers.planning.model_config import load_model_config

    saved = load_model_config(model).dtype
    return "float32" if saved is None else str(saved).removeprefix("torch.")


def job_of(options: argparse.Namespace, source: Source) -> Job:
    """Return the job of a command line, with a script's or recipe's settings below it and TRL's defaults below these.

    Raises:
        ConfigError: a size is impossible, or a setting has a value of another kind.
    """
    settings = source.settings

    def value(option: str, setting: str, default: Any) -> Any:
        given = getattr(options, option)
        return given if given is not None else _setting(settings, setting, default)

    algorithm = options.algorithm or source.algorithm
    accumulation = value("accumulation", "gradient_accumulation_steps", 1)
    rollout_batches = value("steps_per_generation", "steps_per_generation", accumulation)
    iterations = value("num_iterations", "num_iterations", 1)
    if min(accumulation, rollout_batches, iterations) < 1:
        raise ConfigError("accumulation, steps per generation and iterations are 1 or more")
    vllm = _setting(settings, "use_vllm", default=False)
    share = options.vllm_share
    if share is None and vllm and _setting(settings, "vllm_mode", "colocate") == "colocate":
        share = _setting(settings, "vllm_gpu_memory_utilization", TRL_VLLM_SHARE)
    fp16 = _setting(settings, "fp16", default=False)
    beta = value("beta", "beta", TRL_BETA[algorithm])
    if not math.isfinite(beta):
        raise ConfigError(f"beta is {beta}, expected a number")
    targets = source.lora_targets if options.lora_targets is None else _words(options.lora_targets)
    rank = source.lora_rank if options.lora_rank is None else options.lora_rank
    if options.lora_targets is not None and not rank:
        raise ConfigError("--lora-targets needs --lora-rank")
    return Job(
        batch=value("batch", "per_device_train_batch_size", TRL_BATCH),
        prompt=options.prompt if options.prompt is not None else DEFAULT_PROMPT,
        completion=value("completion", "max_completion_length", TRL_COMPLETION),
        weights=options.dtype or _setting(settings, "dtype", "float32"),
        autocast=value("bf16", "bf16", True) or fp16,
        checkpointing=value("gradient_checkpointing", "gradient_checkpointing", True),
        optimizer=value("optim", "optim", "adamw_torch_fused"),
        reference=beta != 0.0,
        rescored=algorithm == "rloo"
        or vllm
        or share is not None
        or accumulation % (rollout_batches * iterations) != 0,
        accumulation=accumulation,
        rollout_batches=rollout_batches,
        ranks=options.ranks if options.ranks is not None else 1,
        layout=options.layout or "ddp",
        attention=options.attention or _attention(settings),
        vllm_share=share,
        vllm_sleeps=value("vllm_sleep", "vllm_enable_sleep_mode", False),
        algorithm=algorithm,
        lora_rank=rank,
        lora_targets=targets,
        device=options.device or "cuda",
    )


def _setting(settings: dict[str, Any], name: str, default: Any) -> Any:
    found = settings.get(name)
    if found is None:
        return default
    kinds = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(found, kinds) or (isinstance(found, bool) and not isinstance(default, bool)):
        raise ConfigError(f"{name} is {found!r}, expected {_KINDS[type(default)]}")
    return found


def _attention(settings: dict[str, Any]) -> str:
    """Return the implementation; flash attention stores what the fused kernels of `sdpa` store."""
    found = str(_setting(settings, "attention", "sdpa"))
    return "sdpa" if "flash" in found else found


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError(f"--lora-targets {text!r}: expected names such as q_proj,v_proj")
    return words


def _check_length(job: Job, positions: int | None) -> None:
    if positions is not None and job.prompt + job.completion > positions:
        raise ConfigError(
            f"{job.prompt} + {job.completion} tokens are more than the model's longest context of {positions}"
        )


def _plan(
    options: argparse.Namespace, model: str, job: Job, gpu_bytes: int | None, notes: Sequence[str]
) -> int:
    # these import torch and TRL, which takes seconds: bad input is reported before
    from grpo_run.trainers.planning.changes import largest_batch, largest_completion, try_changes
    from grpo_run.trainers.planning.model_config import load_model_config
    from grpo_run.trainers.planning.prediction import Predictor
    from grpo_run.trainers.planning.presets import choose

    predictor = Predictor(load_model_config(model), gpu_bytes=gpu_bytes, all_layers=options.all_layers)
    _check_length(job, predictor.shape.positions)
    changes, batch, completion, choice = [], None, None, None
    if options.preset is not None:
        choice = choose(predictor, job, options.preset)
        prediction = choice.prediction
    else:
        prediction = predictor.predict(job, fitted=True)
        if not options.no_changes:
            changes = try_changes(predictor, prediction)
            batch = largest_batch(predictor, prediction)
            completion = largest_completion(predictor, prediction)
    report = Report(
        model=model,
        shape=predictor.shape,
        gpu_bytes=gpu_bytes,
        prediction=prediction,
        changes=changes,
        largest_batch=batch,
        largest_completion=completion,
        choice=choice,
        notes=notes,
    )
    if options.plot is not None:
        write_plot(check_path(options.plot), report, predictor)
    if options.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print_plan(report)
    return 0


def _explain(
    options: argparse.Namespace, model: str, job: Job, observed_bytes: int, notes: Sequence[str]
) -> int:
    from grpo_run.cli.planning.explained import accounted_for, explained_json, print_explained
    from grpo_run.trainers.planning.explaining.assumptions import explanations, floor, ranked
    from grpo_run.trainers.planning.explaining.pairs import together
    from grpo_run.trainers.planning.model_config import load_model_config
    from grpo_run.trainers.planning.prediction import Predictor

    predictor = Predictor(load_model_config(model), all_layers=options.all_layers)
    _check_length(job, predictor.shape.positions)
    prediction = predictor.predict(job)
    order = ranked(explanations(predictor, prediction, padded_to=options.pad_to), observed_bytes)
    pairs = (
        [] if accounted_for(order, observed_bytes) else together(predictor, prediction, order, observed_bytes)
    )
    if options.json:
        print(
            json.dumps(
                {**explained_json(order, observed_bytes, floor(prediction), pairs), "notes": list(notes)},
                indent=2,
            )
        )
    else:
        for note in notes:
            print_paragraph(f"Note: {note}")
        print_explained(order, observed_bytes, floor(prediction), pairs)
    return 0
