"""Memory that grows by so much a step: what every step would have to keep. Called by `cli.planning`.

A job whose rows have one length needs as much in its second step as in its thousandth. If it runs out of memory later, either rows got
longer or something of each step is kept. Says what an observation is consistent with; it proves nothing about the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_run.trainers.planning.explaining import own_code
from grpo_run.trainers.planning.explaining.assumptions import Explanation
from grpo_run.trainers.planning.prediction import Prediction, Predictor

ADDED = {
    "second-optimizer": "an optimizer with its state",
    "second-weights": "a copy of the weights",
    "kept-graph": "the graph of the generation (no_grad is missing)",
    "kept-graph-no-cache": "the graph of a generation without a cache (no_grad is missing)",
}
"""Assumptions whose size may be kept once a step, and what is kept then."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What every step may keep.

    Attributes:
        name: a short word for it, for programs.
        what: in words.
        step_bytes: of one step.
    """

    name: str
    what: str
    step_bytes: float


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A growth that was observed.

    Attributes:
        start_bytes: peak of the job as it is described.
        steps: the fewest and the most after which the observed size was reached.
        kept: what every step may keep.
    """

    start_bytes: float
    steps: tuple[int, int]
    kept: Sequence[Kept]

    def a_step(self, observed_bytes: float) -> tuple[float, float]:
        """Return the least and the most that a step keeps, in bytes; nothing if the job needs more from the start."""
        grown = max(0.0, observed_bytes - self.start_bytes)
        return grown / self.steps[1], grown / self.steps[0]

    def reached_after(self, one: Kept, observed_bytes: float) -> int:
        """Return the step in which the observed size is reached."""
        return max(1, math.ceil((observed_bytes - self.start_bytes) / one.step_bytes))

    def fits(self, one: Kept, observed_bytes: float) -> bool:
        """Whether that step is one of those that were observed."""
        return (
            self.start_bytes < observed_bytes
            and self.steps[0] <= self.reached_after(one, observed_bytes) <= self.steps[1]
        )

    def ranked(self, observed_bytes: float) -> list[Kept]:
        """Return what may be kept, the nearest to the middle of the observed growth first."""
        low, high = (math.log(max(1.0, size)) for size in self.a_step(observed_bytes))
        return sorted(self.kept, key=lambda one: abs(math.log(one.step_bytes) - (low + high) / 2))


def kept_each_step(predictor: Predictor, prediction: Prediction, alone: Sequence[Explanation]) -> list[Kept]:
    """Return what a step may keep, and its size.

    Args:
        predictor: of the model.
        prediction: of the job as it is described.
        alone: single assumptions about it.
    """
    job = prediction.job.as_run
    found = [
        Kept(
            name=one.name,
            what=ADDED[one.name],
            step_bytes=one.allocated_bytes - prediction.allocated_bytes,
        )
        for one in alone
        if one.name in ADDED
    ]
    whole, materialized = own_code.kept_by_a_loss(predictor, job)
    row = 4 * job.tokens * predictor.shape.vocabulary
    found += [
        Kept(
            name="gradients",
            what="a copy of the gradients",
            step_bytes=prediction.phases["optimizer"].traced.get("gradients", 0.0),
        ),
        Kept(
            name="loss",
            what="the graph of TRL's loss (retain_graph=True)",
            step_bytes=job.accumulation * whole,
        ),
        Kept(
            name="loss-logits",
            what="the graph of a loss that materializes all logits (retain_graph=True, or logits that are kept without detach)",
            step_bytes=job.accumulation * materialized,
        ),
        Kept(
            name="logits",
            what="the logits of all tokens in fp32, without their graph",
            step_bytes=job.accumulation * row,
        ),
    ]
    return [one for one in found if one.step_bytes > 0]
