"""Compare what `grpo-run plan` predicts with what real runs of TRL's `train()` allocate, in 16
configurations, and on a CPU in eleven more: SFT, RLOO, adapters, and a mixture of experts.

On a CPU the peaks come from the memory events of torch's profiler; on a GPU from
`torch.cuda.max_memory_allocated`. Each configuration runs in a process of its own. The table has beside it
what `accelerate estimate-memory` and DeepSpeed's estimators say of the same model: both know weights,
gradients and optimizer only, and no job.

    benchmarks/memory_prediction.py --device cpu     up to 8 GiB of memory and half an hour on two cores
    benchmarks/memory_prediction.py --device cuda    up to 1.5 B parameters, a GPU of 40 GiB or more
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from parts.memory_configurations import OTHER_JOBS, configurations
from support.measured_memory import job_fields, measure_in_process

from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import load_model_config
from grpo_run.runtime.planning.prediction import Predictor

NO_GPU = 2
"""Exit code where a GPU is needed and there is none."""
RUN_SECONDS = 3600.0
MIB = 1 << 20
LIBRARIES = ("torch", "trl", "transformers", "accelerate", "deepspeed")


def main(words: Sequence[str]) -> int:
    """Measure, predict, and print a table in Markdown; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare predicted memory with real runs.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="shapes whose name contains this")
    options = parser.parse_args(words)
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("memory_prediction: --device cuda needs a GPU, and torch finds none", file=sys.stderr)
            return NO_GPU
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    print(f"{datetime.datetime.now(tz=datetime.timezone.utc).date()}, {options.device}, {versions}\n")
    print(
        "| model | corner | measured, MiB | predicted | worst phase | accelerate | DeepSpeed ZeRO-2, ZeRO-3 |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    given = [(name, str(corner), job) for name, corner, job in configurations(options.device)]
    if options.device == "cpu":
        given += [(name, "-", {**job, "device": "cpu"}) for name, job in OTHER_JOBS.items()]
    predictors: dict[str, Predictor] = {}
    worst, others = [], []
    for name, corner, job in given:
        if options.only not in name:
            continue
        model = job["model"]
        if model not in predictors:
            predictors[model] = Predictor(load_model_config(model))
        predictor = predictors[model]
        (measured,) = measure_in_process([job], timeout_seconds=RUN_SECONDS)
        prediction = predictor.predict(Job(device=job["device"], **job_fields(job)))
        errors = {
            phase: prediction.phases[phase].allocated_bytes / size - 1 for phase, size in measured.items()
        }
        phase = max(errors, key=lambda one: abs(errors[one]))
        peak = max(measured.values())
        predicted = max(prediction.phases[one].allocated_bytes for one in measured)
        estimates = other_estimates(predictor, job)
        if corner != "-":
            worst.append(abs(errors[phase]))
            others.append([size / peak - 1 for size in estimates])
        accelerate, zero2, zero3 = (f"{size / MIB:,.1f}" for size in estimates)
        print(
            f"| {name} | {corner} | {peak / MIB:,.1f} | {predicted / MIB:,.1f} | {phase}"
            f" {100 * errors[phase]:+.2f} % | {accelerate} | {zero2}; {zero3} |",
            flush=True,
        )
    if not worst:
        return 0
    high = quantiles(worst, n=20, method="inclusive")[-1] if len(worst) > 1 else worst[0]
    print(
        f"\nWithout the rows that have no corner: mean error {100 * mean(worst):.2f} %, 95th percentile"
        f" {100 * high:.2f} %, worst {100 * max(worst):.2f} %."
    )
    means = (100 * mean(abs(one) for one in column) for column in zip(*others, strict=True))
    print("accelerate: {:.0f} %; DeepSpeed ZeRO-2: {:.0f} %, ZeRO-3: {:.0f} % (mean errors).".format(*means))
    return 0


def other_estimates(predictor: Predictor, job: dict[str, Any]) -> tuple[float, float, float]:
    """Return bytes: training with Adam as `accelerate estimate-memory` prints it, and DeepSpeed's ZeRO-2 and
    ZeRO-3 on one GPU.
    """
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(predictor.config, dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    low = job.get("weights", "float32") != "float32" or job.get("autocast", True)
    # DeepSpeed's own count takes all tensors without memory for one
    largest = max(sum(one.numel() for one in part.parameters(recurse=False)) for part in model.modules())
    _, zero2 = estimate_zero2_model_states_mem_needs(predictor.shape.parameters, cpu_offload=False)
    _, zero3, _ = estimate_zero3_model_states_mem_needs(
        predictor.shape.parameters, largest, cpu_offload=False, cpu_offload_params=False
    )
    usage = estimate_training_usage(total, "bfloat16" if low else "float32")
    return float(max(usage.values())), float(zero2), float(zero3)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
