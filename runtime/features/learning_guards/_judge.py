"""The guards: judge the observations of the last steps of a call. Pure.

`judge` asks every guard after each step; `rank.py` adds the observations and acts on the trips. The history
of the observations is a part of a checkpoint, so a resumed run trips at the same steps.

- non-finite: a loss or a gradient is NaN or infinite.
- reward collapse: the reward fell to a much lower level and stays there. A change-point test with medians
  and quantiles, which single outliers do not move, compares the level reached with the last rollouts: three
  in a row for a fall that is large against the noise, twelve for a smaller one. Both must lose a share of
  the level, so a reward that varies around its mean does not trip it. A harder part of the data looks the
  same, so the default response is a warning.
- zero variance: all groups of many consecutive rollouts have equal rewards, so there is no learning signal.
- entropy: the policy has become deterministic, or nearly random.
- divergence: the KL divergence from the reference model is too large. Not observed without one (`beta` 0).
- capped completions: a limit, not the model, ends too many completions.
- mismatch: vLLM samples from another policy than the one that is trained. Not observed without vLLM.
- tools: too many calls of an agent's tools fail. Not observed without tools.
- aborted: too many requests to the server are aborted and made again. Observed of AsyncGRPO only: GRPO ends
  with its first one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import median
from typing import Any, NamedTuple

import pydantic

from grpo_run.runtime.features.learning_guards.settings import GuardResponse, LearningGuard, Rules

MAX_LENGTH = 256
"""Observations of one kind that are kept: several times as many as any guard needs."""


class Observation(NamedTuple):
    """One value, and the optimizer step that it belongs to."""

    step: int
    value: float


Series = Sequence[Observation]


NOT_FINITE = "not_finite"
"""Name of the observation that the loss or the norm of the gradient, before any filter, was not finite. Ranks
may differ in no other one but `aborted`, which only rank 0 sees."""


_STORED = pydantic.TypeAdapter(dict[str, list[Observation]])


class ObservationHistory:
    """The last observations of a `train()` call, by name."""

    def __init__(self) -> None:
        self._series: dict[str, list[Observation]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add what a step has shown, by name: `NOT_FINITE`, and the names of `_FINDERS`."""
        for name, value in values.items():
            if math.isfinite(value):
                series = self._series.setdefault(name, [])
                series.append(Observation(step, float(value)))
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


@dataclass(frozen=True, kw_only=True)
class Trip:
    """A guard has tripped.

    Attributes:
        step: after which it did.
        onset: the first step that shows what is wrong, at most `step`.
        sentence: what is wrong, for the user; a full sentence.
        response: what follows.
    """

    guard: LearningGuard
    step: int
    onset: int
    sentence: str
    response: GuardResponse = GuardResponse.warn


def find_nonfinite(series: Series, step: int) -> Trip | None:
    """Return a trip if the step was not finite and the step before it was.

    Args:
        series: the steps that were not finite.
        step: that has just been done.
    """
    if not series or series[-1].step != step or (len(series) > 1 and series[-2].step == step - 1):
        return None
    return _trip(
        LearningGuard.nonfinite, series[-1:], f"The loss or the gradient of step {step} is not finite."
    )


LEVEL = 16
"""Rollouts that make up a level."""
LEVEL_STRIDE = 4
"""Rollouts from one candidate for the level to the next; a median of each would cost a millisecond per step.
"""
NOISE = 64
"""Differences between two rollouts from which the noise is estimated. A trend does not enlarge them."""
SHARE = 0.5
"""Share of the level that has to be lost, without a limit of the user's."""
TESTS = ((3, 5.0), (12, 3.0))
"""Rollouts in a row, and by how many standard deviations all of them have to be below the level.
`test_reward_collapse.py` measures false alarms on simulated noise.
"""
SPREADS = 3.0
"""A reward with an offset loses no share of its level: a fall of this many times its whole spread counts as
well.
"""


def find_reward_collapse(series: Series, limit: float | None) -> Trip | None:
    """Return a trip if the reward has collapsed.

    Args:
        series: mean reward, one value per rollout.
        limit: share of the level that has to be lost; None for `SHARE`.
    """
    share = limit if limit is not None else SHARE
    for length, deviations in TESTS:
        last = [one.value for one in series[-length:]]
        recent = [one.value for one in series[-length - LEVEL : -length]]
        if len(recent) < LEVEL or max(last) >= median(recent):
            continue  # mostly: what follows takes half a millisecond
        before = [one.value for one in series[:-length]]
        level, sample = _best_level(before)
        low, high = _quantile(sample, 0.05), _quantile(sample, 0.95)
        spread = high - low
        deviation = max(spread / 3.29, _mad_deviation(sample), _noise(before))
        fall = level - max(last)
        large = fall >= share * abs(level) if level else False
        leaves = spread > 0 and fall >= SPREADS * spread
        if fall > 0 and fall >= deviations * deviation and max(last) < low and (large or leaves):
            since = _since_onset(series, level, median(last), length)
            return _trip(
                LearningGuard.reward,
                since,
                f"The mean reward fell from {level:.3g} to {median(last):.3g} at step {since[0].step} and has"
                " stayed there.",
            )
    return None


def _best_level(values: Sequence[float]) -> tuple[float, Sequence[float]]:
    """The highest median of `LEVEL` values in a row, and these values."""
    ends = range(len(values), LEVEL - 1, -LEVEL_STRIDE)
    windows = [values[end - LEVEL : end] for end in ends]
    best = max(windows, key=median)
    return median(best), best


def _mad_deviation(values: Sequence[float]) -> float:
    """The standard deviation, from the median absolute deviation."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def _noise(values: Sequence[float]) -> float:
    """The standard deviation, from a high quantile of the differences between neighbours.

    It sees rare failures in a reward that is usually perfect, whose median deviation is 0; one outlier does
    not move it.
    """
    recent = values[-NOISE - 1 :]
    return _quantile([abs(b - a) for a, b in pairwise(recent)], 0.97) / 2.77


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[round(fraction * (len(ordered) - 1))]


def _since_onset(series: Series, level: float, now: float, length: int) -> Series:
    """The last observations that are all nearer to the present than to the old level."""
    middle = (level + now) / 2
    first = len(series) - length
    while first > 0 and series[first - 1].value < middle:
        first -= 1
    return series[first:]


def _trip(guard: LearningGuard, series: Series, sentence: str) -> Trip:
    return Trip(guard=guard, step=series[-1].step, onset=series[0].step, sentence=sentence)


BEGINNING = 16
"""Observations that show where the run, or the last part of it, began."""


def _above(series: Series, count: int, bound: float) -> Series:
    """The last `count` observations if all of them are above a bound, otherwise nothing."""
    last = series[-count:]
    return last if len(last) == count and all(one.value > bound for one in last) else ()


ZERO_VARIANCE_ROLLOUTS = 30
"""Without a limit of the user's. With a tenth of the groups informative, 30 rollouts of one group in a row
without any happen once in 24 runs; with more groups in a rollout, hardly ever.
"""


def find_zero_variance(series: Series, limit: float | None) -> Trip | None:
    """Return a trip if no group of the last rollouts had two different rewards.

    Args:
        series: share of the groups with equal rewards, one value per rollout.
        limit: how many rollouts in a row; None for `ZERO_VARIANCE_ROLLOUTS`.
    """
    rollouts = max(1, round(limit)) if limit is not None else ZERO_VARIANCE_ROLLOUTS
    last = series[-rollouts:]
    if len(last) < rollouts or any(one.value < 1.0 for one in last):
        return None
    return _trip(
        LearningGuard.zero_variance,
        last,
        f"All groups of the last {rollouts} rollouts, since step {last[0].step}, have equal rewards: the"
        " rewards teach nothing.",
    )


LEAST_NATS = 0.001
"""Per token. Sampling cannot explore below; vLLM was seen to fail at 0.0004. Late GRPO runs are at 0.05 and
above.
"""
LEAST_OF_BEGINNING = 0.1
"""A model that begins with less is allowed this share of it."""
MORE_NATS = 3.0
"""Rise above the beginning: from a usual 0.5 nats to a perplexity of 33 per token."""
ENTROPY_STEPS = 3


def find_entropy_change(series: Series, limit: float | None) -> Trip | None:
    """Return a trip if the entropy was out of bounds in each of the last `ENTROPY_STEPS` steps.

    Args:
        series: mean entropy in nats per token.
        limit: the smallest allowed; None for `LEAST_NATS`, or less if the run began with less.
    """
    newest = series[-1].value if series else 0.0
    if (LEAST_NATS if limit is None else limit) <= newest <= MORE_NATS:
        return None  # within every bound, as nearly always
    # a value of 0 is what TRL computes if every token is masked
    last = list(islice((one for one in reversed(series) if one.value != 0), ENTROPY_STEPS))[::-1]
    if len(last) < ENTROPY_STEPS or last[-1].step != series[-1].step:
        return None
    first = list(islice((one for one in series if one.value != 0), BEGINNING + ENTROPY_STEPS))
    enough = len(first) == BEGINNING + ENTROPY_STEPS
    began = median(one.value for one in first[:BEGINNING]) if enough else None
    if limit is not None:
        least = limit
    elif began is not None:
        least = min(LEAST_NATS, LEAST_OF_BEGINNING * began)
    else:
        return None
    if all(one.value < least for one in last):
        return _entropy_trip(last, f"below {least:g}")
    if began is not None and all(one.value > began + max(MORE_NATS, MORE_NATS * began) for one in last):
        return _entropy_trip(last, f"far above the {began:.3g} of the beginning")
    return None


def _entropy_trip(last: Series, where: str) -> Trip:
    return _trip(
        LearningGuard.entropy,
        last,
        f"The entropy of the policy has been {where} since step {last[0].step}: {last[-1].value:.3g} nats per"
        " token.",
    )


LIMIT_NATS = 10.0
"""Per token. Published GRPO runs stay below 1; at 10 a usual token of the policy has a probability of e-10 or
so in the reference model.
"""
DIVERGENCE_STEPS = 3
"""Steps in a row; the estimator (k3) has rare large values."""


def find_divergence(series: Series, limit: float | None) -> Trip | None:
    """Return a trip if the divergence was above the limit in each of the last `DIVERGENCE_STEPS` steps.

    Args:
        series: mean KL divergence in nats per token.
        limit: the largest allowed; None for `LIMIT_NATS`.
    """
    bound = limit if limit is not None else LIMIT_NATS
    last = _above(series, DIVERGENCE_STEPS, bound)
    if not last:
        return None
    return _trip(
        LearningGuard.kl,
        last,
        f"The KL divergence from the reference model has been above {bound:g} since step {last[0].step}:"
        f" {last[-1].value:.3g} nats per token.",
    )


RISE_TO = 0.5
"""Without a limit of the user's, an alarm needs a rise from below half of this share to above it. A model
that has not learned to stop is at 1 from the first step, which its user knows.
"""
CAPPED_ROLLOUTS = 5


SHARES = {
    LearningGuard.capped: "of the completions have been ended by a limit since step",
    LearningGuard.tools: "of the calls of tools have failed since step",
    LearningGuard.aborted: "of the requests to the rollout server have been aborted since step",
}
"""Guards of a share that must not be too large, and what it is a share of."""


def find_large_share(guard: LearningGuard, series: Series, limit: float | None) -> Trip | None:
    """Return a trip if a share was above the limit in each of the last `CAPPED_ROLLOUTS` rollouts or steps.

    Args:
        series: shares.
        limit: the largest allowed; None for a rise above `RISE_TO`. A model that has yet to learn how its
            tools are called fails from the first step.
    """
    earlier = series[:-CAPPED_ROLLOUTS]
    bound = limit if limit is not None else RISE_TO
    last = _above(series, CAPPED_ROLLOUTS, bound)
    if not last:
        return None
    if limit is None and (
        len(earlier) < BEGINNING or median(one.value for one in earlier[-BEGINNING:]) >= bound / 2
    ):
        return None
    return _trip(guard, last, f"More than {bound:.0%} {SHARES[guard]} {last[0].step}: {last[-1].value:.0%}.")


LEAST_MISMATCH = 0.1
"""Nats per token. Engines in bf16 are at 0.01 to 0.02, with experts or fp8 at several times as much, and a
`top_p` of 0.9 adds up to 0.1. With weights that were some steps old, 0.2 was seen.
"""
MISMATCH_TIMES = 5.0
"""How much more than at the beginning. It grows with entropy and with the length of completions, too."""
MISMATCH_ROLLOUTS = 5
MISMATCH_EARLIER = 3
"""Rollouts before these that show the beginning: an engine that never gets weights is right in the first ones
only."""


def find_mismatch(series: Series, limit: float | None) -> Trip | None:
    """Return a trip if the difference was above the limit in each of the last `MISMATCH_ROLLOUTS` rollouts.

    Args:
        series: mean difference between the log-probabilities of vLLM and of the trainer, one value per
            rollout.
        limit: the largest allowed; None for what the beginning of the run allows.
    """
    earlier = [one.value for one in series[:-MISMATCH_ROLLOUTS][:BEGINNING]]
    if limit is not None:
        bound, was = limit, ""
    elif len(earlier) >= MISMATCH_EARLIER:
        began = median(earlier)
        bound, was = max(LEAST_MISMATCH, MISMATCH_TIMES * began), f", at the beginning {began:.3g}"
    else:
        return None
    last = _above(series, MISMATCH_ROLLOUTS, bound)
    if not last:
        return None
    return _trip(
        LearningGuard.mismatch,
        last,
        f"vLLM's log-probabilities have differed from the trainer's by more than {bound:.3g} since step"
        f" {last[0].step}: {last[-1].value:.3g} nats per token{was}. It may generate with old weights.",
    )


_FINDERS: Mapping[LearningGuard, tuple[str, Callable[[Series, float | None], Trip | None]]] = {
    LearningGuard.zero_variance: ("zero_variance", find_zero_variance),
    LearningGuard.kl: ("kl", find_divergence),
    LearningGuard.entropy: ("entropy", find_entropy_change),
    LearningGuard.reward: ("reward", find_reward_collapse),
    LearningGuard.mismatch: ("mismatch", find_mismatch),
    **{guard: (guard.value, functools.partial(find_large_share, guard)) for guard in SHARES},
}
"""By guard, the name of the observations that it judges, and how. A step that trains on an earlier rollout
shows no reward, one without a reference model no `kl`, one without vLLM no `mismatch`, one without tools no
`tools`, one without new rollouts of AsyncGRPO no `aborted`."""


def judge(history: ObservationHistory, step: int, rules: Rules) -> list[Trip]:
    """Return the trips of a step that has just been added to the history, the gravest first.

    A guard that has tripped without ending the attempt begins anew: its series is emptied.

    Args:
        step: the optimizer step.
        rules: guards that are off are not asked.
    """
    trips = []
    if rules.response(LearningGuard.nonfinite) is not GuardResponse.off:
        trips.append(find_nonfinite(history.series(NOT_FINITE), step))
    for guard, (name, find) in _FINDERS.items():
        series = history.series(name)
        if rules.response(guard) is GuardResponse.off or not series or series[-1].step != step:
            continue
        trips.append(find(series, rules.limits.get(guard)))
        if trips[-1] is not None:
            history.forget(name)
    return [replace(trip, response=rules.response(trip.guard)) for trip in trips if trip is not None]
