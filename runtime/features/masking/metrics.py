"""The metrics of sample masking."""

from __future__ import annotations

from grpo_run.runtime.features.masking.events import MaskedSamples, MaskingReason
from grpo_run.runtime.metrics import Metric, RunObservation, Values, counter


def _masked(run: RunObservation) -> MaskedSamples:
    return run.history.part(MaskedSamples)


def _samples(run: RunObservation) -> Values:
    counts = _masked(run).samples
    return {reason: counts[reason] for reason in (*map(str, MaskingReason), *counts)}


METRICS: tuple[Metric[RunObservation], ...] = (
    counter("grpo_samples_masked_total", "count", _samples,
            "Samples left out of baseline and loss, by reason; steps repeated after a recovery count again.",
            "reason"),
    counter("grpo_groups_masked_total", "count", lambda run: _masked(run).groups,
            "Groups of completions of which no sample was left."),
    counter("grpo_steps_without_samples_total", "steps", lambda run: _masked(run).steps_without_samples,
            "Optimizer steps of rollouts of which no sample was left; the optimizer's momentum still moved"
            " the weights."),
)  # fmt: skip
