"""What `grpo-run plan` has found, as one value, and the same as JSON.

Built by `cli/plan.py`; `output.py` prints it as text. Predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.planning.changes import ChangeOutcome
from grpo_run.runtime.planning.job import KINDS
from grpo_run.runtime.planning.model_config import Shape
from grpo_run.runtime.planning.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A prediction and what was asked of it.

    Attributes:
        model: as the user named it.
        shape: its sizes.
        gpu_bytes: memory of the GPU, if it is known.
        prediction: for the job as it is described.
        changes: predicted again, the best first.
        largest_batch: rows of the largest micro-batch that fits; None if none does, if the job's own
            is larger than is looked for, or if no GPU is known.
        notes: what of the script or recipe is not followed, a sentence each.
    """

    model: str
    shape: Shape
    gpu_bytes: int | None
    prediction: Prediction
    changes: Sequence[ChangeOutcome] = ()
    largest_batch: int | None = None
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the whole range is within the GPU's memory; None if no GPU is known."""
        return None if self.gpu_bytes is None else self.prediction.high_bytes <= self.gpu_bytes


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return a prediction for programs; all sizes in bytes."""
    prediction = report.prediction
    return {
        "model": report.model,
        "parameters": report.shape.parameters,
        "gpu_bytes": report.gpu_bytes,
        "job": vars(prediction.job),
        "binding_phase": prediction.binding,
        "low_bytes": round(prediction.low_bytes),
        "high_bytes": round(prediction.high_bytes),
        "allocated_bytes": round(prediction.allocated_bytes),
        "fits": report.fits,
        "fragmentation_bytes": round(prediction.fragmentation_bytes),
        "phases": {
            phase: {
                "allocated_bytes": round(memory.allocated_bytes),
                "low_bytes": round(memory.low_bytes),
                "high_bytes": round(memory.high_bytes),
                "kinds": {kind: round(memory.traced.get(kind, 0.0)) for kind in KINDS},
                "added": {
                    term.name: [round(term.low_bytes), round(term.high_bytes)]
                    for term in prediction.terms
                    if phase in term.phases
                },
            }
            for phase, memory in prediction.phases.items()
        },
        "terms": [term._asdict() for term in prediction.terms],
        "largest_batch": report.largest_batch,
        "changes": [
            {
                "name": one.change.name,
                "cost": one.change.cost,
                "exact": one.change.exact,
                "high_bytes": round(one.high_bytes),
                "saved_bytes": round(one.saved_bytes),
                "fits": one.fits,
            }
            for one in report.changes
        ],
        "notes": list(report.notes),
        "compared_with_gpu": False,
    }
