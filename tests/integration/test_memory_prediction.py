"""Predicted peaks against real runs: TRL's `train()` on the CPU, measured by the memory events of torch's
profiler.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.measured_memory import job_fields, measure_in_process

from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import load_model_config
from grpo_run.runtime.planning.prediction import Predictor

TINY = "layers=2,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000"
DEEP = "layers=7,hidden=128,heads=4,kv-heads=2,intermediate=352,vocabulary=4000"
"""Deep enough to be extrapolated, and small enough for every test."""
_GENERATED = {"generated": True, "live": True, "model": DEEP, "batch": 4, "prompt": 24, "completion": 72}
LIVE_JOBS: dict[str, dict[str, Any]] = {
    "autocast, a reference": {**_GENERATED, "reference": True},
    "ZeRO-3, 2 ranks": {**_GENERATED, "layout": "zero3", "ranks": 2},
    "GPT-2, fp32": {
        **_GENERATED, "model": "type=gpt2,layers=8,hidden=256,heads=4,vocabulary=8000,positions=1024",
        "prompt": 64, "completion": 32, "autocast": False,
    },
    "bf16 weights, long prompts, no checkpointing": {
        **_GENERATED, "prompt": 256, "completion": 24, "weights": "bfloat16", "rescored": True,
        "checkpointing": False,
    },
    "LoRA": {**_GENERATED, "lora_rank": 8},
    "RLOO, two accumulated micro-batches": {
        **_GENERATED, "algorithm": "rloo", "rescored": True, "reference": True, "accumulation": 2,
        "rollout_batches": 2,
    },
}  # fmt: skip
"""Jobs whose model generates, which are compared in every phase, with the live bytes of each."""
PHASES = {"forward", "backward", "optimizer"}


def _errors(job: dict[str, Any], measured: dict[str, float]) -> dict[str, float]:
    assert measured.keys() >= PHASES
    predicted = Predictor(load_model_config(job["model"])).predict(Job(device="cpu", **job_fields(job)))
    return {phase: predicted.phases[phase].allocated_bytes / size - 1 for phase, size in measured.items()}


CORNERS: tuple[dict[str, Any], ...] = (
    {"model": TINY, "batch": 4, "prompt": 16, "completion": 32, "checkpointing": False, "rescored": True},
    {"model": TINY, "batch": 2, "prompt": 8, "completion": 64, "autocast": False, "accumulation": 2},
)
SFT_AND_GENERATION: tuple[dict[str, Any], ...] = (
    {"model": TINY, "batch": 4, "prompt": 0, "completion": 96, "algorithm": "sft"},
    {**LIVE_JOBS["autocast, a reference"], "model": TINY, "completion": 24},
)


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(SFT_AND_GENERATION, id="sft-and-generation"),
        pytest.param(CORNERS, id="corners", marks=pytest.mark.full),
    ],
)
def test_a_real_run_needs_what_was_predicted(jobs: tuple[dict[str, Any], ...]) -> None:
    """SFT of a tiny model and a job that generates under autocast with a reference; two corners of GRPO."""
    for job, measured in zip(jobs, measure_in_process(jobs, timeout_seconds=300), strict=True):
        errors = _errors(job, measured)
        assert max(map(abs, errors.values())) < 0.02, (job, errors)


@pytest.mark.full
@pytest.mark.parametrize("name", LIVE_JOBS)
def test_every_phase_needs_what_was_predicted_in_live_bytes(name: str) -> None:
    """Within 5 %, generation included, against a tracker that shares nothing with that of `plan`."""
    job = LIVE_JOBS[name]
    (measured,) = measure_in_process([job], timeout_seconds=600)
    assert "generate" in measured
    assert ("score" in measured) == bool(job.get("reference") or job.get("rescored"))
    errors = _errors(job, measured)
    for phase, size in measured.items():
        print(f"{name} | {phase} | {size / 2**20:.1f} | {100 * errors[phase]:+.2f} %")
    assert max(map(abs, errors.values())) < 0.05, errors
