"""The metrics of sample masking."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_run.runtime.features.masking.events import MOST_REASONS, MaskedSamples, MaskingReason
from grpo_run.runtime.metrics import Label, Metric, RunObservation, Sample, run_value

REASON = Label(name="reason", values=None, most=MOST_REASONS)


def _masked(observation: RunObservation) -> MaskedSamples:
    return observation.status.history.part(MaskedSamples)


def _samples(observation: RunObservation) -> Iterator[Sample]:
    counts = _masked(observation).samples
    for reason in dict.fromkeys((*map(str, MaskingReason), *counts)):
        yield (reason,), float(counts[reason])


METRICS = (
    Metric(
        name="grpo_samples_masked_total", kind="counter", unit="count", labels=(REASON,),
        read=_samples,
        help="Samples left out of baseline and loss, by reason; steps repeated after a recovery count again.",
    ),
    Metric(
        name="grpo_groups_masked_total", kind="counter", unit="count",
        read=run_value(lambda run: float(_masked(run).groups)),
        help="Groups of completions of which no sample was left.",
    ),
    Metric(
        name="grpo_steps_without_samples_total", kind="counter", unit="steps",
        read=run_value(lambda run: float(_masked(run).steps_without_samples)),
        help="Optimizer steps of rollouts of which no sample was left; the optimizer's momentum still moved"
        " the weights.",
    ),
    Metric(
        name="grpo_rewards_repeated_total", kind="counter", unit="count",
        read=run_value(lambda run: float(_masked(run).repeated_rewards)),
        help="Rollouts whose rewards were computed once more, because too many samples had no valid reward.",
    ),
)  # fmt: skip
