"""A prediction as JSON. Called by `plan.py`."""

from __future__ import annotations

from typing import Any

from grpo_run.cli.planning.report import Report
from grpo_run.trainers.planning.timeline import KINDS


def as_json(report: Report) -> dict[str, Any]:
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
        "fragmentation_bytes": prediction.fragmentation_bytes,
        "phases": {
            phase: {
                "allocated_bytes": round(memory.allocated_bytes),
                "low_bytes": round(memory.low_bytes),
                "high_bytes": round(memory.high_bytes),
                "closed_form_bytes": round(prediction.closed_form[phase])
                if phase in prediction.closed_form
                else None,
                "kinds": {kind: round(memory.traced.get(kind, 0.0)) for kind in KINDS},
                "added": {name: [round(low), round(high)] for name, (low, high) in memory.extra.items()},
                "fit": None if (found := prediction.fit_of(phase)) is None else vars(found),
            }
            for phase, memory in prediction.phases.items()
        },
        "first_step_bytes": {phase: round(size) for phase, size in prediction.first_step.items()},
        "terms": [vars(term) for term in prediction.terms],
        "largest_batch": report.largest_batch,
        "largest_completion": report.largest_completion,
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
        "preset": None
        if report.choice is None
        else {
            "name": report.choice.name,
            "settings": report.choice.settings,
            "free_share": report.choice.free_share,
        },
        "notes": list(report.notes),
        "compared_with_gpu": False,
    }
