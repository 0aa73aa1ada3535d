"""`grpo-run plan`: predict the memory of a training job, what fits, and which changes need less.

Parses, reads the recipe or runs the script until its first `train()`, asks `runtime.planning`, and prints a
table or JSON. Needs no GPU.
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

from grpo_run.cli.launching.script_file import check_configs, check_source, source_of
from grpo_run.cli.planning.explained import Explained, explained_json, print_explained
from grpo_run.cli.planning.options import build_parser, parse_size, parse_steps, split_arguments
from grpo_run.cli.planning.output import count_text, print_plan
from grpo_run.cli.planning.report import PlanReport, as_json
from grpo_run.cli.planning.requested_job import job_of
from grpo_run.cli.planning.script import read_script
from grpo_run.cli.planning.sources import JobSource, notes_of, read_file
from grpo_run.cli.text import print_paragraph
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.files import replace_file
from grpo_run.runtime.planning.changes import largest_batch, largest_completion, try_changes
from grpo_run.runtime.planning.explaining import (
    GrowthPerStep,
    explanations,
    floor,
    kept_each_step,
    ranked,
    together,
    without_effect,
)
from grpo_run.runtime.planning.job import MAX_TOKENS, Job
from grpo_run.runtime.planning.model_config import build_config, default_attention, load_model_config
from grpo_run.runtime.planning.prediction import Predictor
from grpo_run.runtime.planning.series import over_a_step
from grpo_run.runtime.upstream.versions import check_extra, untested_versions


def main(arguments: Sequence[str]) -> int:
    """Predict and print; returns the exit code."""
    own, of_script = split_arguments(arguments)
    options = build_parser().parse_args(own)
    for sentence in untested_versions():
        print(f"grpo-run: {sentence}", file=sys.stderr)
    gpu_bytes = None if options.gpu is None else parse_size("--gpu", options.gpu)
    observed = None if options.explain is None else parse_size("--explain", options.explain)
    if options.pad_to is not None and not 1 <= options.pad_to <= MAX_TOKENS:
        raise UsageError(f"--pad-to is {options.pad_to}, expected 1 to {MAX_TOKENS}")
    if options.pad_to is not None and observed is None:
        raise UsageError("--pad-to is for --explain SIZE")
    steps = None if options.steps is None else parse_steps(options.steps)
    if steps is not None and observed is None:
        raise UsageError("--steps is for --explain SIZE")
    source = _source(options, of_script)
    name = options.model or source.settings.get("model")
    if not isinstance(name, str):
        raise UsageError("plan needs --model: a folder with config.json, a cached repository, or a shape")
    load = functools.cache(lambda: _config(name, None if options.model else source.configuration))
    if source.settings.get("dtype") == "auto" and options.dtype is None:
        source.settings["dtype"] = _saved_dtype(load())
    if options.preset is not None:
        _check_preset(options)
    job = job_of(options, source)
    if options.pad_to is not None and options.pad_to <= job.length:
        raise UsageError(f"--pad-to is {options.pad_to}, but rows have {job.lengths} already")
    if job.vllm_share is not None and gpu_bytes is None:
        raise UsageError("--vllm-share is a share of the GPU; give --gpu SIZE too")
    if options.plot is not None:
        _plot_path(options.plot)
        if observed is not None:
            raise UsageError("--plot draws a prediction; leave out --explain")
    # transformers and TRL are imported from here on, which takes seconds: bad input is reported before
    if options.attention is None and "attention" not in source.settings:
        job = _with_default_attention(job, load(), source)
    predictor = Predictor(load(), gpu_bytes=gpu_bytes, all_layers=options.all_layers)
    positions = predictor.shape.positions
    if positions is not None and job.length > positions:
        job = _within_context(job, positions, options, source)
    if observed is None:
        return _plan(options, name, predictor, job, source.notes)
    return _explain(options, predictor, job, observed, steps, source.notes)


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
        print(
            f"{path} is run until its first train(): without weights, a GPU or trackers.",
            file=sys.stderr if options.json else sys.stdout,
            flush=True,
        )
        found = read_script(path, of_script, options.ranks or 1)
    elif of_script:
        raise ConfigError(f"{path} is no script, so it takes no arguments after --")
    else:
        found = read_file(options.source, options.algorithm)
    found.notes += notes_of(found)
    return found


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


def _check_preset(options: argparse.Namespace) -> None:
    for option in ("batch", "accumulation", "num_generations"):
        if getattr(options, option) is not None:
            raise UsageError(f"--preset sets what --{option.replace('_', '-')} says; give one of them")


def _saved_dtype(config: Any) -> str:
    """Return the type in which weights are saved, which transformers keeps unless it is told another."""
    return "float32" if config.dtype is None else str(config.dtype).removeprefix("torch.")


def _plan(
    options: argparse.Namespace, name: str, predictor: Predictor, job: Job, notes: Sequence[str]
) -> int:
    prediction, complete = predictor.predict(job, fitted=True), not options.no_changes
    report = PlanReport(
        model=name,
        shape=predictor.shape,
        gpu_bytes=predictor.gpu_bytes,
        prediction=prediction,
        changes=try_changes(predictor, prediction) if complete else [],
        largest_batch=largest_batch(predictor, prediction) if complete else None,
        largest_completion=largest_completion(predictor, prediction) if complete else None,
        preset=options.preset,
        notes=notes,
    )
    if options.plot is not None:
        _write_plot(_plot_path(options.plot), report, predictor)
    if options.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print_plan(report)
    return 0


def _explain(
    options: argparse.Namespace,
    predictor: Predictor,
    job: Job,
    observed_bytes: int,
    steps: tuple[int, int] | None,
    notes: Sequence[str],
) -> int:
    prediction = predictor.predict(job)
    alone = explanations(predictor, prediction, padded_to=options.pad_to)
    same = without_effect(alone)
    found = Explained(
        order=ranked([one for one in alone if one not in same], observed_bytes),
        observed_bytes=observed_bytes,
        floor=floor(prediction, predictor.shape.parameters),
        same=same,
        growth=None
        if steps is None
        else GrowthPerStep(
            start_bytes=prediction.allocated_bytes,
            steps=steps,
            kept=kept_each_step(predictor, prediction, alone),
        ),
    )
    if not found.accounted_for:
        found = replace(found, pairs=together(predictor, prediction, alone, observed_bytes))
    if options.json:
        print(json.dumps({**explained_json(found), "notes": list(notes)}, indent=2))
    else:
        for note in notes:
            print_paragraph(f"Note: {note}")
        print_explained(found)
    return 0


MAX_NAME = 48
"""Characters of the model's name that are drawn."""


def _plot_path(name: str) -> Path:
    """Return where to draw, before anything is traced.

    Raises:
        UsageError: the name does not end in .svg, or there is no such folder.
    """
    check_extra("--plot", "matplotlib")
    path = Path(name)
    if path.suffix != ".svg":
        raise UsageError(f"--plot {name!r}: expected a file name that ends in .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {name!r}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"--plot {name!r} is a folder")
    return path


def _write_plot(path: Path, report: PlanReport, predictor: Predictor) -> None:
    """Trace the whole model, draw memory over a step, and write the picture.

    Raises:
        UsageError: the file cannot be written.
    """
    from grpo_run.dashboards.memory_plot import draw

    job = report.prediction.job
    name = report.model if len(report.model) <= MAX_NAME else f"{report.model[: MAX_NAME - 1]}…"
    picture = draw(
        over_a_step(predictor, report.prediction),
        title=f"{count_text(report.shape.parameters)} parameters, {job.batch} rows of {job.lengths}",
        subtitle=(
            f"{name} · {job.weights} weights{', bf16 autocast' if job.autocast else ''}, {job.optimizer}"
            f"{', gradient checkpointing' if job.checkpointing else ''}"
            f"{f', LoRA {job.lora_rank}' if job.lora_rank else ''}"
        ),
        limit_bytes=None if report.gpu_bytes is None else float(report.gpu_bytes),
    )
    try:
        replace_file(path, picture.encode(), mode=0o644)
    except OSError as error:
        raise UsageError(f"--plot: cannot write {path}: {error.strerror or error}") from None
