"""Predictions written out by hand, for tests of what is made of them. Nothing is traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_run.cli.planning.report import PlanReport
from grpo_run.runtime.planning._terms import Term
from grpo_run.runtime.planning.changes import Change, ChangeOutcome
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import Shape
from grpo_run.runtime.planning.prediction import PredictedPhase, Prediction

GIB = 1 << 30
SHAPE = Shape(layers=24, hidden=896, vocabulary=151936, positions=32768, parameters=494_000_000)
JOB = Job(batch=8, prompt=256, completion=768)
CONTEXT = Term(
    name="CUDA context", low_bytes=0.25 * GIB, high_bytes=0.5 * GIB, provenance="measured by somebody"
)


def a_prediction(**changes: Any) -> Prediction:
    """Return a prediction of 8 to 8.5 GiB that is highest in `backward`."""
    kinds = {
        "generate": {"weights": 2.0 * GIB, "optimizer": 4.0 * GIB},
        "forward": {"weights": 2.0 * GIB, "optimizer": 4.0 * GIB, "activations": 1.5 * GIB},
        "backward": {"weights": 2.0 * GIB, "optimizer": 4.0 * GIB, "gradients": 1.0 * GIB,
        "logits": 0.75 * GIB},
        "optimizer": {"weights": 2.0 * GIB, "optimizer": 3.0 * GIB, "gradients": 2.0 * GIB},
    }  # fmt: skip
    values: dict[str, Any] = {
        "job": JOB,
        "phases": {phase: _memory(held) for phase, held in kinds.items()},
        "terms": [CONTEXT],
        "trained_parameters": SHAPE.parameters,
    }
    return Prediction(**{**values, **changes})


def a_report(**changes: Any) -> PlanReport:
    """Return a report on `a_prediction` with one change, for a GPU of 16 GiB."""
    change = Change(
        name="gradient_checkpointing=True",
        cost="one more forward pass",
        exact=True,
        job=replace(JOB, checkpointing=True),
    )
    values: dict[str, Any] = {
        "model": "some/model",
        "shape": SHAPE,
        "gpu_bytes": 16 * GIB,
        "prediction": a_prediction(),
        "changes": [ChangeOutcome(change=change, high_bytes=6.0 * GIB, saved_bytes=2.5 * GIB, fits=True)],
        "largest_batch": 21,
    }
    return PlanReport(**{**values, **changes})


def _memory(held: dict[str, float]) -> PredictedPhase:
    allocated = sum(held.values())
    return PredictedPhase(
        traced=held,
        allocated_bytes=allocated,
        low_bytes=allocated + CONTEXT.low_bytes,
        high_bytes=allocated + CONTEXT.high_bytes,
    )
