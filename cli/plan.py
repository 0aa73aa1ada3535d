"""`grpo-run plan`: predict the memory of a training job, what fits, and which changes need less.

Parses, reads the recipe or runs the script, the user's or TRL's, until its first `train()`, asks
`runtime.planning`, and prints a table or JSON. Needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.cli.planning.options import build_parser, parse_size, split_arguments
from grpo_run.cli.planning.output import print_plan
from grpo_run.cli.planning.report import PlanReport, as_json
from grpo_run.cli.planning.requested_job import job_of
from grpo_run.cli.planning.script import read_script
from grpo_run.cli.planning.sources import JobSource, notes_of, read_recipe, trl_algorithm
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.launching.script_file import check_configs, check_source, source_of
from grpo_run.runtime.planning.changes import largest_batch, try_changes
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import build_config, default_attention, load_model_config
from grpo_run.runtime.planning.prediction import Predictor
from grpo_run.runtime.upstream.versions import untested_versions
from grpo_run.trainers.recipes.recipe import find_recipe


def main(arguments: Sequence[str]) -> int:
    """Predict and print; returns the exit code."""
    own, of_script = split_arguments(arguments)
    options = build_parser().parse_args(own)
    for sentence in untested_versions():
        print(f"grpo-run: {sentence}", file=sys.stderr)
    gpu_bytes = None if options.gpu is None else parse_size("--gpu", options.gpu)
    source = _source(options, of_script)
    name = options.model or source.settings.get("model")
    if not isinstance(name, str):
        raise UsageError("plan needs --model: a folder with config.json, a cached repository, or a shape")
    load = functools.cache(lambda: _config(name, None if options.model else source.configuration))
    job = job_of(options, source)
    if job.vllm_share is not None and gpu_bytes is None:
        raise UsageError("--vllm-share is a share of the GPU; give --gpu SIZE too")
    # transformers and TRL are imported from here on, which takes seconds: bad input is reported before
    if options.attention is None and "attention" not in source.settings:
        job = _with_default_attention(job, load(), source)
    predictor = Predictor(load(), gpu_bytes=gpu_bytes)
    positions = predictor.shape.positions
    if positions is not None and job.length > positions:
        job = _within_context(job, positions, options, source)
    return _plan(options, name, predictor, job, source.notes)


def _within_context(job: Job, positions: int, options: argparse.Namespace, source: JobSource) -> Job:
    """Return a job whose prompts, which nobody has given, leave room for the completions.

    Raises:
        ConfigError: given lengths are more than the model's longest context.
    """
    given = options.prompt is not None or source.settings.get("max_prompt_length") or job.algorithm == "sft"
    if given or job.completion >= positions:
        option = "--length" if job.algorithm == "sft" else "--prompt or --completion"
        raise ConfigError(
            f"{job.lengths} are more than the model's longest context of {positions}; give a smaller {option}"
        )
    job = replace(job, prompt=positions - job.completion)
    source.notes.append(
        f"Nothing says how long prompts are: {job.prompt} tokens, which fill the model's context (--prompt)."
    )
    return job


def _config(name: str, values: dict[str, Any] | None) -> Any:
    """Return transformers' configuration of a model: by its name, or of the one that a script has built."""
    return load_model_config(name) if values is None else build_config(values, name)


def _source(options: argparse.Namespace, of_script: Sequence[str]) -> JobSource:
    """Return what the recipe or script says, and say first that a script is run."""
    if options.source is None:
        return JobSource()
    path = Path(options.source)
    if path.suffix == ".py":
        check_source(source_of(options.source, module=False))
        check_configs(of_script)
        found = _of_script(options, options.source, options.source, of_script)
    elif of_script:
        raise ConfigError(f"{path} is no script, so it takes no arguments after --")
    elif (algorithm := trl_algorithm(find_recipe(options.source), options.algorithm)) is not None:
        shown = f"{path}: TRL's script for {algorithm.upper()} (--algorithm names another)"
        found = _of_script(options, f"trl.scripts.{algorithm}", shown, ["--config", options.source])
    else:
        found = read_recipe(options.source)
    found.notes += notes_of(found)
    return found


def _of_script(options: argparse.Namespace, script: str, shown: str, words: Sequence[str]) -> JobSource:
    print(
        f"{shown} is run until its first train(): without weights, a GPU or trackers.",
        file=sys.stderr if options.json else sys.stdout,
        flush=True,
    )
    return read_script(script, words, options.ranks or 1)


def _with_default_attention(job: Job, config: Any, source: JobSource) -> Job:
    """Return the job with the attention that transformers chooses for its model, and note it where it stores
    matrices.
    """
    attention = default_attention(config)
    if attention == "eager":
        source.notes.append(
            "transformers has no fused attention for this model: attention matrices are stored (eager)."
        )
    return replace(job, attention=attention)


def _plan(
    options: argparse.Namespace, name: str, predictor: Predictor, job: Job, notes: Sequence[str]
) -> int:
    prediction, complete = predictor.predict(job), not options.no_changes
    report = PlanReport(
        model=name,
        shape=predictor.shape,
        gpu_bytes=predictor.gpu_bytes,
        prediction=prediction,
        changes=try_changes(predictor, prediction) if complete else [],
        largest_batch=largest_batch(predictor, prediction) if complete else None,
        notes=notes,
    )
    if options.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print_plan(report)
    return 0
