"""What the guards judge: the observations of one step, and the history of each of them.

The history is a part of a checkpoint's exact state, so a resumed run raises the same alarms. Plain data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pydantic

MAX_LENGTH = 256
"""Observations of one kind that are kept: several times as many as any guard needs."""


class Observation(NamedTuple):
    """One value, and the optimizer step that it belongs to."""

    step: int
    value: float


Series = Sequence[Observation]


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """What one step has shown; None for what it did not show. Equal on every rank, except `finite`.

    A step that trains on an earlier rollout shows no reward. `kl` is None without a reference model.

    Attributes:
        finite: the loss and the norm of the gradient, before any filter, were finite.
        reward: mean over all completions.
        zero_variance: share of the groups whose rewards are all equal.
        kl: mean KL divergence from the reference model, in nats.
        entropy: mean entropy of the policy's next token, in nats.
        capped: share of the completions that a limit ended.
    """

    finite: bool = True
    reward: float | None = None
    zero_variance: float | None = None
    kl: float | None = None
    entropy: float | None = None
    capped: float | None = None


NAMES = tuple(field.name for field in fields(StepValues) if field.name != "finite")
NOT_FINITE = "not_finite"


_STORED = pydantic.TypeAdapter(dict[str, list[Observation]])


class ObservationHistory:
    """The last observations of a `train()` call, by name."""

    def __init__(self) -> None:
        self._series: dict[str, list[Observation]] = {}

    def add(self, step: int, values: StepValues) -> None:
        """Add what a step has shown."""
        if not values.finite:
            self._append(NOT_FINITE, Observation(step, 1.0))
        for name in NAMES:
            value = getattr(values, name)
            if value is not None and math.isfinite(value):
                self._append(name, Observation(step, float(value)))

    def _append(self, name: str, observation: Observation) -> None:
        series = self._series.setdefault(name, [])
        series.append(observation)
        del series[:-MAX_LENGTH]

    def series(self, name: str) -> Series:
        """Return the observations of one name, oldest first."""
        return self._series.get(name, ())

    def forget(self, name: str) -> None:
        """Begin a series anew, after an alarm that changed nothing: the next one compares with what
        follows.
        """
        self._series.pop(name, None)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: [list(one) for one in series] for name, series in self._series.items()}

    @classmethod
    def from_json(cls, value: object) -> ObservationHistory:
        """Return what `as_json` wrote.

        Raises:
            ValueError: `value` has another format.
        """
        history = cls()
        for name, series in _STORED.validate_python(value).items():
            history._series[name] = series[-MAX_LENGTH:]
        return history
