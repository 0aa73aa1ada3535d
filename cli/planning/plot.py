"""The picture of a prediction, as a file. Called by `cli/plan.py`; `dashboards.memory_plot` draws it."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_run.cli.planning.report import PlanReport
from grpo_run.dashboards.memory_plot import MemoryPlot, PlottedPhase, draw
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.planning.prediction import Predictor
from grpo_run.runtime.planning.series import over_a_step

MAX_NAME = 48
"""Characters of the model's name that are drawn."""


def check_path(name: str) -> Path:
    """Return where to write, before anything is traced.

    Raises:
        UsageError: the name does not end in .svg, or there is no such folder.
    """
    path = Path(name)
    if path.suffix != ".svg":
        raise UsageError(f"--plot {name!r}: expected a file name that ends in .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {name!r}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"--plot {name!r} is a folder")
    return path


def write_plot(path: Path, report: PlanReport, predictor: Predictor) -> None:
    """Trace the whole model and write the picture.

    Raises:
        UsageError: the file cannot be written.
    """
    prediction, job = report.prediction, report.prediction.job
    phases = []
    for name, instants in over_a_step(predictor, prediction).items():
        memory = prediction.phases[name]
        spread = memory.high_bytes - memory.low_bytes
        phases.append(PlottedPhase(name=name, instants=instants, spread_bytes=spread))
    name = report.model if len(report.model) <= MAX_NAME else f"{report.model[: MAX_NAME - 1]}…"
    picture = MemoryPlot(
        title=f"{_count(report.shape.parameters)} parameters, {job.batch} rows of {job.lengths}",
        subtitle=(
            f"{name} · {job.weights} weights{', bf16 autocast' if job.autocast else ''}, {job.optimizer}"
            f"{', gradient checkpointing' if job.checkpointing else ''}"
            f"{f', LoRA {job.lora_rank}' if job.lora_rank else ''}"
        ),
        phases=phases,
        limit_bytes=None if report.gpu_bytes is None else float(report.gpu_bytes),
    )
    try:
        with open(
            path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o644)
        ) as file:
            file.write(draw(picture))
    except OSError as error:
        raise UsageError(f"--plot: cannot write {path}: {error.strerror or error}") from None


def _count(parameters: int) -> str:
    """Return a number of parameters with its unit."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
