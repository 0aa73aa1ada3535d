"""The samples that a run has excluded from the loss, counted by reason from its journal.

`history.py` applies the events that ranks write (`runtime/rank/rollouts/_masking_report.py`); status, metrics
and the incident report show the counts. Steps that are repeated after a recovery count again, because their
samples are excluded again. Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from grpo_run.watchdog.text import counted


class MaskingReason(str, Enum):
    """Why a sample is excluded. The value is the metric label and the journal's word."""

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
    quarantined = "quarantined"
    """The prompt is in quarantine; the completion is of another one."""
    small_group = "small_group"
    """The sample has a reward, but fewer than two of its group have one."""


@dataclass(kw_only=True)
class MaskedSamples:
    """Counts of the run so far. `apply_*` are the only methods that change them."""

    samples: Counter[str] = field(default_factory=Counter)
    """Masked samples by reason; an unknown reason counts as `failed`."""
    groups: int = 0
    """Groups of which no sample is left."""
    steps_without_samples: int = 0
    """Optimizer steps without any sample. AdamW moves the weights in them all the same, by its momentum."""
    repeated_rewards: int = 0
    """How often the rewards of a rollout were computed once more."""

    nan_read_as_none: int = 0
    """Rewards that were NaN for all completions of a prompt: the function does not apply, and nothing was
    excluded.
    """

    def apply_nan_read_as_none(self, record: dict[str, Any]) -> None:
        """Count NaN that was read as None."""
        self.nan_read_as_none += int(record["count"])

    def apply_sample_masked(self, record: dict[str, Any]) -> None:
        """Count samples that one rank has excluded for one reason."""
        reason = str(record["reason"])
        known = reason in MaskingReason._value2member_map_
        self.samples[reason if known else MaskingReason.failed.value] += int(record["count"])

    def apply_group_masked(self, record: dict[str, Any]) -> None:
        """Count groups of which no sample is left, and steps without samples."""
        self.groups += int(record["count"])
        self.steps_without_samples += int(record.get("steps_without_samples") or 0)

    def __bool__(self) -> bool:
        return bool(self.samples)

    @property
    def summary(self) -> str:
        """One line for the user; empty if nothing was excluded."""
        if not self.samples:
            return ""
        reasons = ", ".join(f"{reason} {number}" for reason, number in self.samples.most_common())
        parts = [f"{counted(sum(self.samples.values()), 'sample')} ({reasons})"]
        if self.groups:
            parts.append(counted(self.groups, "whole group"))
        if self.steps_without_samples:
            parts.append(f"{counted(self.steps_without_samples, 'step')} without any sample")
        if self.repeated_rewards:
            parts.append(f"rewards of {counted(self.repeated_rewards, 'rollout')} computed again")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**vars(self), "samples": dict(self.samples)}
