"""What `grpo-run plan` has found, as one value. Built by `plan.py`; printed by `output.py` and `as_json.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_run.trainers.planning.changes import Outcome
from grpo_run.trainers.planning.model_config import Shape
from grpo_run.trainers.planning.prediction import Prediction
from grpo_run.trainers.planning.presets import Choice


@dataclass(frozen=True, kw_only=True)
class Report:
    """A prediction and what was asked of it.

    Attributes:
        model: as the user named it.
        shape: its sizes.
        gpu_bytes: memory of the GPU, if it is known.
        prediction: for the job as it is described.
        changes: predicted again, the best first.
        largest_batch: rows of the largest micro-batch that fits; None if none does or no GPU is known.
        largest_completion: tokens of the longest completion that fits, likewise.
        choice: what a preset has chosen, if one was asked for; `prediction` is then that of its job.
        notes: what of the script or recipe is not followed, a sentence each.
    """

    model: str
    shape: Shape
    gpu_bytes: int | None
    prediction: Prediction
    changes: Sequence[Outcome] = ()
    largest_batch: int | None = None
    largest_completion: int | None = None
    choice: Choice | None = None
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the whole range is within the GPU's memory; None if no GPU is known."""
        return None if self.gpu_bytes is None else self.prediction.high_bytes <= self.gpu_bytes
