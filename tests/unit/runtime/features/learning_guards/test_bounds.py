"""Each guard at its bounds: the value, the count and the beginning that just trip it, and those that just do
not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_run.runtime.features.learning_guards._judge import (
    Observation,
    Series,
    Trip,
    find_capped_completions,
    find_divergence,
    find_entropy_change,
    find_failing_tools,
    find_mismatch,
    find_nonfinite,
    find_zero_variance,
)
from grpo_run.runtime.features.learning_guards.settings import LearningGuard

Find = Callable[[Series, float | None], Trip | None]


def series(values: list[float], *, every: int = 1) -> list[Observation]:
    """Observations at steps 10, 10 + every, and so on."""
    return [Observation(10 + every * number, value) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("find", "values", "limit", "trips"),
    [
        # more than half of the completions, five rollouts in a row, after a beginning below half of that
        (find_capped_completions, [0.1] * 16 + [0.51] * 5, None, True),
        (find_capped_completions, [0.1] * 16 + [0.5] * 5, None, False),
        (find_capped_completions, [0.1] * 16 + [0.51] * 2 + [0.5] + [0.51] * 2, None, False),
        (find_capped_completions, [0.1] * 16 + [0.5] + [0.51] * 4, None, False),
        (find_capped_completions, [0.1] * 15 + [0.51] * 5, None, False),
        (find_capped_completions, [0.24] * 16 + [0.51] * 5, None, True),
        (find_capped_completions, [0.25] * 16 + [0.51] * 5, None, False),
        (find_capped_completions, [0.9] * 20 + [0.1] * 16 + [0.51] * 5, None, True),
        (find_capped_completions, [0.1] * 20 + [0.9] * 16 + [0.95] * 5, None, False),
        # a model that has never learned to stop is capped from the first step
        (find_capped_completions, [1.0] * 100, None, False),
        # with a limit of the user's, the beginning does not count
        (find_capped_completions, [0.91] * 5, 0.9, True),
        (find_capped_completions, [0.91] * 4, 0.9, False),
        (find_capped_completions, [0.9] * 5, 0.9, False),
        # more than ten nats, three steps in a row
        (find_failing_tools, [0.2] * 16 + [0.51] * 5, None, True),
        (find_failing_tools, [0.2] * 16 + [0.51] * 4, None, False),
        (find_failing_tools, [0.9] * 40, None, False),
        (find_failing_tools, [0.3] * 5, 0.25, True),
        (find_divergence, [10.01] * 3, None, True),
        (find_divergence, [10.01] * 2, None, False),
        (find_divergence, [10.0] * 3, None, False),
        (find_divergence, [10.01, 10.0, 10.01], None, False),
        (find_divergence, [1.01] * 3, 1.0, True),
        (find_divergence, [1.0] * 3, 1.0, False),
        (find_divergence, [10.01] * 3, 11.0, False),
        # below a thousandth of a nat, or a tenth of the beginning, three steps in a row
        (find_entropy_change, [0.5] * 16 + [0.00099] * 3, None, True),
        (find_entropy_change, [0.5] * 16 + [0.001] * 3, None, False),
        (find_entropy_change, [0.5] * 16 + [0.00099] * 2, None, False),
        (find_entropy_change, [0.5] * 15 + [0.00099] * 3, None, False),
        (find_entropy_change, [0.5] * 16 + [0.00099, 0.001, 0.00099], None, False),
        (find_entropy_change, [0.004] * 16 + [0.00041] * 3, None, False),
        (find_entropy_change, [0.004] * 16 + [0.00039] * 3, None, True),
        # more than three nats above the beginning, or four times it
        (find_entropy_change, [0.5] * 16 + [3.51] * 3, None, True),
        (find_entropy_change, [0.5] * 16 + [3.49] * 3, None, False),
        (find_entropy_change, [0.5] * 16 + [3.51, 3.49, 3.51], None, False),
        (find_entropy_change, [0.5] * 15 + [3.51] * 3, None, False),
        (find_entropy_change, [2.0] * 16 + [7.9] * 3, None, False),
        (find_entropy_change, [2.0] * 16 + [8.1] * 3, None, True),
        # the beginning is the first sixteen observations, however many follow
        (find_entropy_change, [0.5] * 16 + [3.0] * 40 + [3.51] * 3, None, True),
        (find_entropy_change, [3.0] * 16 + [0.5] * 40 + [3.51] * 3, None, False),
        # a model that began deterministic, or random, is not blamed for it
        (find_entropy_change, [11.9] * 40, None, False),
        (find_entropy_change, [5e-4] * 40, None, False),
        # exactly 0 is what TRL computes if all completions of a step are masked: no observation
        (find_entropy_change, [0.5] * 20 + [0.0] * 4, None, False),
        (find_entropy_change, [0.5] * 20 + [4e-4, 4e-4, 0.0, 0.0], None, False),
        (find_entropy_change, [0.5] * 20 + [4e-4, 0.0, 4e-4, 4e-4], None, True),
        # a limit of the user's needs no beginning, and a high entropy still does
        (find_entropy_change, [0.09] * 3, 0.1, True),
        (find_entropy_change, [0.1] * 3, 0.1, False),
        (find_entropy_change, [0.09] * 2, 0.1, False),
        (find_entropy_change, [3.51] * 3, 0.1, False),
        (find_entropy_change, [0.5] * 16 + [3.51] * 3, 0.1, True),
        # thirty rollouts in a row
        (find_zero_variance, [1.0] * 30, None, True),
        (find_zero_variance, [1.0] * 29, None, False),
        (find_zero_variance, [1.0] * 29 + [0.999], None, False),
        (find_zero_variance, [0.999] + [1.0] * 29, None, False),
        (find_zero_variance, [1.0] * 3, 2.6, True),
        (find_zero_variance, [1.0] * 2, 2.6, False),
        (find_zero_variance, [1.0], 0.2, True),
        # more than a tenth of a nat, five rollouts in a row, after three that were less
        (find_mismatch, [0.015] * 3 + [0.101] * 5, None, True),
        (find_mismatch, [0.015] * 3 + [0.1] * 5, None, False),
        (find_mismatch, [0.015] * 2 + [0.101] * 5, None, False),
        (find_mismatch, [0.015] * 3 + [0.101] * 4, None, False),
        (find_mismatch, [0.015] * 3 + [0.101] * 3 + [0.1] + [0.101] * 4, None, False),
        (find_mismatch, [1e-7] * 30 + [0.099] * 5, None, False),
        # more than five times the beginning, where that is more
        (find_mismatch, [0.04] * 16 + [0.201] * 5, None, True),
        (find_mismatch, [0.04] * 16 + [0.2] * 5, None, False),
        # the beginning is the median of the first sixteen, however many follow
        (find_mismatch, [0.04] * 9 + [0.01] * 7 + [0.01] * 40 + [0.199] * 5, None, False),
        (find_mismatch, [0.04] * 7 + [0.01] * 9 + [0.04] * 40 + [0.199] * 5, None, True),
        (find_mismatch, [1.7] * 100, None, False),
        # with a limit of the user's, the beginning does not count
        (find_mismatch, [0.06] * 5, 0.05, True),
        (find_mismatch, [0.06] * 4, 0.05, False),
        (find_mismatch, [0.05] * 5, 0.05, False),
        (find_mismatch, [0.015] * 20 + [0.3] * 5, 0.5, False),
    ],
)
def test_a_guard_trips_just_beyond_its_bounds(
    find: Find, values: list[float], limit: float | None, *, trips: bool
) -> None:
    """Value by value; nothing else than the bounds differs."""
    assert (find(series(values), limit) is not None) is trips


@pytest.mark.parametrize(
    "find", [find_capped_completions, find_divergence, find_entropy_change, find_mismatch, find_zero_variance]
)
def test_no_observation_is_no_alarm(find: Find) -> None:
    """Before the first rollout."""
    assert find([], None) is None
    assert find([], 0.5) is None


@pytest.mark.parametrize(
    ("find", "values", "limit", "guard", "steps", "sentence"),
    [
        (find_capped_completions, [0.1] * 16 + [0.6, 0.7, 0.8, 0.9, 0.75], None, LearningGuard.capped,
         (42, 50),
         "More than 50% of the completions have been ended by a limit since step 42: 75%."),
        (find_failing_tools, [0.1] * 16 + [0.6, 0.7, 0.8, 0.9, 0.75], None, LearningGuard.tools,
         (42, 50),
         "More than 50% of the calls of tools have failed since step 42: 75%."),
        (find_divergence, [0.1, 11.0, 12.0, 13.5], None, LearningGuard.kl, (12, 16),
         "The KL divergence from the reference model has been above 10 since step 12: 13.5 nats per token."),
        (find_entropy_change, [0.5] * 16 + [0.0009, 0.0008, 0.0007], None, LearningGuard.entropy, (42, 46),
         "The entropy of the policy has been below 0.001 since step 42: 0.0007 nats per token."),
        (find_entropy_change, [0.5] * 16 + [4.0, 5.0, 6.0], None, LearningGuard.entropy, (42, 46),
         ("The entropy of the policy has been far above the 0.5 of the beginning since step 42: 6 nats per"
          " token.")),
        (find_zero_variance, [0.5, 1.0, 1.0, 1.0], 3, LearningGuard.zero_variance, (12, 16),
         "All groups of the last 3 rollouts, since step 12, have equal rewards: the rewards teach nothing."),
        (find_mismatch, [0.01, 0.02, 0.02, 0.02, 0.21, 0.22, 0.23, 0.24, 0.251], None,
         LearningGuard.mismatch, (18, 26),
         ("vLLM's log-probabilities have differed from the trainer's by more than 0.1 since step 18: 0.251"
          " nats per token, at the beginning 0.02. It may generate with old weights.")),
        (find_mismatch, [0.06] * 5, 0.05, LearningGuard.mismatch, (10, 18),
         ("vLLM's log-probabilities have differed from the trainer's by more than 0.05 since step 10: 0.06"
          " nats per token. It may generate with old weights.")),
    ],
)  # fmt: skip
def test_an_alarm_says_since_when_and_how_bad(
    find: Find,
    values: list[float],
    limit: float | None,
    guard: LearningGuard,
    steps: tuple[int, int],
    sentence: str,
) -> None:
    """One observation every two steps: the steps are those of the observations, not their number."""
    found = find(series(values, every=2), limit)
    assert found == Trip(guard=guard, onset=steps[0], step=steps[1], sentence=sentence)


def test_a_step_is_not_finite_once_in_a_row() -> None:
    """The step, its neighbor before it, and older steps."""

    def find(steps: list[int], step: int) -> int | None:
        alarm = find_nonfinite([Observation(one, 1.0) for one in steps], step)
        assert alarm is None or alarm.step == alarm.onset
        return alarm.step if alarm else None

    assert find([], 5) is None
    assert find([5], 5) == 5
    assert find([4, 5], 5) is None
    assert find([3, 5], 5) == 5
    assert find([3, 4], 5) is None
    assert find([1, 2, 4, 5], 5) is None
