"""The samples that a run has excluded from the loss, counted by reason from what ranks write (`_report.py`).

Steps that are repeated after a recovery count again, because their samples are excluded again. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.charts import Chart
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.watchdog.text import TextEnum, counted


class MaskingReason(TextEnum):
    """Why a sample is excluded. The value is the metric label and the journal's word. Features have further
    reasons.
    """

    nan = "nan"
    """A reward function returned NaN for the sample and not for its whole group."""
    infinite = "infinite"
    """A reward is infinite, or too large for 32 bits."""
    output = "output"
    """A reward function returned something else than one number or None for each completion."""
    exception = "exception"
    """A reward function raised an exception."""
    timeout = "timeout"
    """A reward function did not return in time."""
    died = "died"
    """The process of a reward function died."""
    memory = "memory"
    """The process of a reward function was ended because it used too much memory."""
    not_tried = "not_tried"
    """The reward function failed on the whole batch, and time did not allow to call it for the sample alone.
    """
    failed = "failed"
    """A reward function failed in another way."""
    length = "length"
    """The completion was cut at its maximum length."""
    repetition = "repetition"
    """The completion was cut because it repeated itself."""
    deadline = "deadline"
    """The completion was cut at its deadline."""
    small_group = "small_group"
    """The sample has a reward, but fewer than two of its group have one."""


MOST_REASONS = 32
"""Different reasons that are counted, of masking and of features."""


class SampleMasked(Event, kw_only=True):
    """Samples that one rank has excluded for one reason.

    Attributes:
        rollout: its number in the call, from which the samples are.
        function: the reward function; None if it is none.
        samples, digests: numbers of the first samples in the rollout of all ranks, and checksums of their
            completions.
    """

    train_call: int | None = None
    rollout: int | None = None
    function: str | None = None
    reason: str
    samples: Sequence[int] = ()
    digests: Sequence[int] | None = None
    count: int
    evaluating: bool = False


class GroupMasked(Event, kw_only=True):
    """Groups of which no sample is left, of so many in a rollout."""

    groups: Sequence[int] = ()
    count: int
    of: int = 0
    steps_without_samples: int = 0
    evaluating: bool = False


@dataclass(kw_only=True)
class MaskedSamples(HistoryPart):
    """Counts of the run so far. `apply` is the only method that changes them."""

    EVENTS: ClassVar = (SampleMasked, GroupMasked)
    CHARTS: ClassVar = (
        Chart(key="masked", group="rollouts", title="Masked samples, by reason",
              metrics=("grpo_samples_masked_total",)),
    )  # fmt: skip

    samples: Counter[str] = field(default_factory=Counter)
    """Masked samples by reason, of `MaskingReason` or of a feature; too many count as `failed`."""
    groups: int = 0
    """Groups of which no sample is left."""
    steps_without_samples: int = 0
    """Optimizer steps without any sample. AdamW moves the weights in them all the same, by its momentum."""

    def apply(self, event: SampleMasked | GroupMasked) -> None:
        """Count what one rank has excluded."""
        match event:
            case SampleMasked():
                known = event.reason in self.samples or len(self.samples) < MOST_REASONS
                self.samples[event.reason if known else MaskingReason.failed.value] += event.count
            case GroupMasked():
                self.groups += event.count
                self.steps_without_samples += event.steps_without_samples

    def drawn(self, event: Event) -> Mapping[str, float]:
        """Return the masked samples of a step."""
        return {f"masked/{event.reason}": event.count} if isinstance(event, SampleMasked) else {}

    def without_gradient(self) -> Mapping[str, float]:
        """Return the steps of rollouts without samples."""
        return {"no sample was left": self.steps_without_samples}

    def as_json(self) -> dict[str, Any]:
        """Return the counts."""
        return {"masked": {**vars(self), "samples": dict(self.samples)}}

    def facts(self) -> dict[str, str]:
        """Return one line; empty if nothing was excluded."""
        return {"masked": self._summary()}

    def ended(self) -> Sequence[str]:
        """Return the line as a sentence."""
        return [f"Excluded from the loss: {summary}."] if (summary := self._summary()) else []

    def _summary(self) -> str:
        if not self.samples:
            return ""
        reasons = ", ".join(f"{reason} {number}" for reason, number in self.samples.most_common())
        parts = [f"{counted(sum(self.samples.values()), 'sample')} ({reasons})"]
        if self.groups:
            parts.append(counted(self.groups, "whole group"))
        if self.steps_without_samples:
            parts.append(f"{counted(self.steps_without_samples, 'step')} without any sample")
        return ", ".join(parts)


PART = MaskedSamples
