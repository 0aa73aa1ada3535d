"""`grpo-run plan`: predict the memory of a GRPO job, say what fits and which changes need less.

Parses, reads the recipe or script, asks `trainers.planning`, and prints a table or JSON. Starts no process and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from grpo_run.cli.planning.as_json import as_json
from grpo_run.cli.planning.options import build_parser, parse_size
from grpo_run.cli.planning.output import print_plan
from grpo_run.cli.planning.report import Report
from grpo_run.cli.planning.sources import read_source
from grpo_run.runtime.errors import UsageError
from grpo_run.trainers.planning.job import MAX_TOKENS, Job

DEFAULT_PROMPT = 256
"""Tokens; no setting of TRL says how long prompts are."""
TRL_BATCH, TRL_COMPLETION = 8, 256
"""TRL's defaults of `per_device_train_batch_size` and `max_completion_length`."""
TINY_MODEL = "layers=2,hidden=128,heads=4,kv-heads=2,intermediate=256,vocabulary=64"
"""Stands for the model that packaged recipes build themselves."""


def main(arguments: Sequence[str]) -> int:
    """Predict and print; returns the exit code."""
    options = build_parser().parse_args(arguments)
    gpu_bytes = None if options.gpu is None else parse_size("--gpu", options.gpu)
    observed = None if options.explain is None else parse_size("--explain", options.explain)
    if options.pad_to is not None and not 1 <= options.pad_to <= MAX_TOKENS:
        raise UsageError(f"--pad-to is {options.pad_to}, expected 1 to {MAX_TOKENS}")
    settings = {} if options.source is None else read_source(options.source)
    job = job_of(options, settings)
    model = options.model or settings.get("model")
    if not isinstance(model, str):
        if options.source is None or options.source.endswith(".py"):
            raise UsageError("plan needs --model: a folder with config.json, a cached repository, or a shape")
        model = TINY_MODEL
    if job.vllm_share is not None and gpu_bytes is None:
        raise UsageError("--vllm-share is a share of the GPU; give --gpu SIZE too")
    return (
        _plan(options, model, job, gpu_bytes) if observed is None else _explain(options, model, job, observed)
    )


def job_of(options: argparse.Namespace, settings: dict[str, Any]) -> Job:
    """Return the job of a command line, with a script's or recipe's settings below it and TRL's defaults below these.

    Raises:
        ConfigError: a size is impossible.
    """

    def value(option: str, setting: str, default: Any) -> Any:
        given = getattr(options, option)
        if given is not None:
            return given
        found = settings.get(setting, default)
        return found if isinstance(found, type(default)) else default

    accumulation = value("accumulation", "gradient_accumulation_steps", 1)
    rollout_batches = value("steps_per_generation", "steps_per_generation", accumulation)
    iterations = value("num_iterations", "num_iterations", 1)
    share = options.vllm_share
    if share is None and settings.get("use_vllm") and settings.get("vllm_mode", "colocate") == "colocate":
        share = float(settings.get("vllm_gpu_memory_utilization", 0.3))
    vllm = bool(settings.get("use_vllm")) or share is not None
    return Job(
        batch=value("batch", "per_device_train_batch_size", TRL_BATCH),
        prompt=options.prompt if options.prompt is not None else DEFAULT_PROMPT,
        completion=value("completion", "max_completion_length", TRL_COMPLETION),
        weights=options.dtype or "float32",
        autocast=value("bf16", "bf16", True),
        checkpointing=value("gradient_checkpointing", "gradient_checkpointing", True),
        optimizer=value("optim", "optim", "adamw_torch_fused"),
        reference=float(value("beta", "beta", 0.0)) != 0.0,
        rescored=vllm or accumulation % (rollout_batches * iterations) != 0,
        accumulation=accumulation,
        rollout_batches=rollout_batches,
        ranks=options.ranks if options.ranks is not None else 1,
        layout=options.layout or "ddp",
        attention=options.attention or "sdpa",
        vllm_share=share,
        vllm_sleeps=value("vllm_sleep", "vllm_enable_sleep_mode", False),
        device=options.device or "cuda",
    )


def _plan(options: argparse.Namespace, model: str, job: Job, gpu_bytes: int | None) -> int:
    # these import torch and TRL, which takes seconds: bad input is reported before
    from grpo_run.trainers.planning.changes import largest_batch, largest_completion, try_changes
    from grpo_run.trainers.planning.model_config import load_model_config
    from grpo_run.trainers.planning.prediction import Predictor

    predictor = Predictor(load_model_config(model), gpu_bytes=gpu_bytes, all_layers=options.all_layers)
    prediction = predictor.predict(job, fitted=True)
    changes, batch, completion = [], None, None
    if not options.no_changes:
        changes = try_changes(predictor, prediction)
        batch, completion = largest_batch(predictor, prediction), largest_completion(predictor, prediction)
    report = Report(
        model=model,
        shape=predictor.shape,
        gpu_bytes=gpu_bytes,
        prediction=prediction,
        changes=changes,
        largest_batch=batch,
        largest_completion=completion,
    )
    if options.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print_plan(report)
    return 0


def _explain(options: argparse.Namespace, model: str, job: Job, observed_bytes: int) -> int:
    from grpo_run.cli.planning.explained import explained_json, print_explained
    from grpo_run.trainers.planning.explaining.assumptions import explanations, floor, ranked
    from grpo_run.trainers.planning.model_config import load_model_config
    from grpo_run.trainers.planning.prediction import Predictor

    predictor = Predictor(load_model_config(model), all_layers=options.all_layers)
    prediction = predictor.predict(job)
    order = ranked(explanations(predictor, prediction, padded_to=options.pad_to), observed_bytes)
    if options.json:
        print(json.dumps(explained_json(order, observed_bytes, floor(prediction)), indent=2))
    else:
        print_explained(order, observed_bytes, floor(prediction))
    return 0
