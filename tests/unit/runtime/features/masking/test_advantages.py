"""Survivors have the advantages of a computation by hand over survivors, and masked samples have none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

Score = Callable[..., Any]

NAN, INFINITE = math.nan, math.inf
GOOD = [1.25, 2.0, 4.0, 0.0, 3.0, 0.5, 0.0, 1.5]
OTHER = [0.2, 0.1, 0.0, 0.4, 0.9, 0.3, 0.8, 0.5]
EPSILON = 1e-4
"""What TRL adds to a standard deviation."""


def with_faults(values: Sequence[float], **faults: Any) -> list[Any]:
    """Return the values, with others at `at_N`."""
    return [faults.get(f"at_{index}", value) for index, value in enumerate(values)]


def groups(survivors: Sequence[int]) -> list[list[int]]:
    """Return the survivors by group of four."""
    return [[index for index in survivors if index // 4 == group] for group in range(2)]


def by_hand(totals: Sequence[float], survivors: Sequence[int], scale: str) -> list[float]:
    """GRPO's advantages with the sum of the functions."""
    advantages = [0.0] * 8
    spread = statistics.stdev([totals[index] for index in survivors]) if scale == "batch" else 0.0
    for group in groups(survivors):
        if not group:
            continue
        rewards = [totals[index] for index in group]
        mean = statistics.fmean(rewards)
        deviation = statistics.stdev(rewards) if scale == "group" else spread
        for index in group:
            difference = totals[index] - mean
            advantages[index] = difference if scale == "none" else difference / (deviation + EPSILON)
    return advantages


def close(rollout: Any, expected: Sequence[float]) -> None:
    """Compare advantages."""
    torch.testing.assert_close(rollout["advantages"], torch.tensor(expected), rtol=1e-4, atol=1e-5)


CASES = {
    "nan": (with_faults(GOOD, at_2=NAN), [0, 1, 3, 4, 5, 6, 7]),
    "infinite": (with_faults(GOOD, at_0=INFINITE, at_5=-INFINITE), [1, 2, 3, 4, 6, 7]),
    "too large": (with_faults(GOOD, at_7=1e39), [0, 1, 2, 3, 4, 5, 6]),
    "no number": (with_faults(GOOD, at_1="high"), [0, 2, 3, 4, 5, 6, 7]),
    "one survivor": (with_faults(GOOD, at_0=NAN, at_1=INFINITE, at_2=NAN), [4, 5, 6, 7]),
    "none survives": (with_faults(GOOD, at_0=NAN, at_1=NAN, at_2=NAN, at_3=NAN), [4, 5, 6, 7]),
}


@pytest.mark.parametrize(
    ("case", "scale"), [*((case, "group") for case in CASES), ("nan", "batch"), ("nan", "none")]
)
def test_grpo_with_one_function(grpo: Any, session: Any, rollout: Score, case: str, scale: str) -> None:
    """Each kind of failure, and each way to scale."""
    values, survivors = CASES[case]
    grpo.scale_rewards = scale
    close(rollout(grpo, session, values), by_hand(GOOD, survivors, scale))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_with_several_functions_of_which_one_fails(
    grpo: Any, session: Any, rollout: Score, scale: str
) -> None:
    """The sample leaves whole: its other reward is not compared with sums of two."""
    grpo.scale_rewards = scale
    found = rollout(grpo, session, with_faults(GOOD, at_2=NAN, at_6=INFINITE), OTHER)
    totals = [left + right for left, right in zip(GOOD, OTHER, strict=True)]
    close(found, by_hand(totals, [0, 1, 3, 4, 5, 7], scale))


def test_grpo_that_normalizes_each_function_first(grpo: Any, session: Any, rollout: Score) -> None:
    """The other aggregation, with one of two functions failing."""
    grpo.multi_objective_aggregation = "normalize_then_sum"
    found = rollout(grpo, session, with_faults(GOOD, at_2=NAN, at_6=INFINITE), OTHER)
    survivors = [0, 1, 3, 4, 5, 7]
    sums = dict.fromkeys(survivors, 0.0)
    for values in (GOOD, OTHER):
        for group in groups(survivors):
            rewards = [values[index] for index in group]
            for index in group:
                difference = values[index] - statistics.fmean(rewards)
                sums[index] += difference / (statistics.stdev(rewards) + EPSILON)
    mean, deviation = statistics.fmean(sums.values()), statistics.stdev(sums.values())
    close(
        found, [(sums[index] - mean) / (deviation + EPSILON) if index in sums else 0.0 for index in range(8)]
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rloo(rloo: Any, session: Any, rollout: Score, case: str, normalize: bool) -> None:
    """The baseline of a survivor is the mean of the other survivors of its group."""
    values, survivors = CASES[case]
    rloo.normalize_advantages = normalize
    expected = {
        index: GOOD[index] - statistics.fmean(GOOD[other] for other in group if other != index)
        for group in groups(survivors)
        for index in group
    }
    if normalize:
        mean, deviation = statistics.fmean(expected.values()), statistics.stdev(expected.values())
        expected = {index: (value - mean) / (deviation + EPSILON) for index, value in expected.items()}
    close(rollout(rloo, session, values), [expected.get(index, 0.0) for index in range(8)])


def test_the_logged_rewards_are_those_of_survivors(either: Any, session: Any, rollout: Score) -> None:
    """Mean and standard deviation of each function and of the sum."""
    rollout(either, session, with_faults(GOOD, at_2=NAN), OTHER)
    logged = {name: values[-1] for name, values in either._metrics["train"].items()}
    left = [index for index in range(8) if index != 2]
    assert logged["rewards/reward_1/mean"] == pytest.approx(statistics.fmean(OTHER[index] for index in left))
    totals = [GOOD[index] + OTHER[index] for index in left]
    assert logged["reward"] == pytest.approx(statistics.fmean(totals))
    assert logged["reward_std"] == pytest.approx(statistics.stdev(totals))


def test_a_group_without_samples_is_not_counted_as_one_that_varies(
    either: Any, session: Any, rollout: Score
) -> None:
    """The other group's rewards are all equal, so all groups that are left have no variance."""
    rollout(either, session, [NAN, NAN, NAN, 1.0, 2.0, 2.0, 2.0, 2.0])
    assert either._metrics["train"]["frac_reward_zero_std"][-1] == 1.0


def test_none_keeps_its_meaning(either: Any, session: Any, rollout: Score) -> None:
    """A function that does not apply to a sample adds nothing to it; nothing is excluded or masked."""
    values = with_faults(GOOD, at_2=None)
    found = rollout(either, session, values, OTHER)
    plain = either._generate_and_score_completions(
        [{"prompt": prompt} for prompt in ["ab12cd"] * 4 + ["xy34zw"] * 4]
    )
    assert torch.equal(found["advantages"], plain["advantages"])
    assert "tool_mask" not in found
    assert session.notified == []


def test_nan_of_a_whole_group_is_read_as_none(either: Any, session: Any, rollout: Score) -> None:
    """Under TRL it means so today; nothing is compared with a zero then. It is said once."""
    found = rollout(either, session, [NAN] * 4 + GOOD[4:], OTHER)
    expected = rollout(either, session, [None] * 4 + GOOD[4:], OTHER)
    assert torch.equal(found["advantages"], expected["advantages"])
    (said,) = session.notified
    assert "reward_0" in said
    assert "not applicable" in said


def test_a_function_that_returns_too_few_rewards_costs_the_rollout_only(
    either: Any, session: Any, rollout: Score
) -> None:
    """Nobody knows which samples the rewards belong to, so none is used."""
    found = rollout(either, session, lambda completions, **_: [1.0] * 7, OTHER)
    close(found, [0.0] * 8)


def test_an_async_function_is_checked_too(either: Any, session: Any, rollout: Score) -> None:
    """TRL awaits it in a loop of its own."""

    async def reward(completions: list[str], **_: Any) -> list[float]:
        return with_faults(GOOD, at_2=NAN)

    found = rollout(either, session, reward, [0.0] * 8)
    assert found["advantages"][2] == 0
    assert found["advantages"][[0, 1, 3, 4, 5, 6, 7]].ne(0).all()


def test_a_reward_model_cannot_return_none(either: Any, session: Any, rollout: Score) -> None:
    """Its NaN is a failure, also of a whole group."""
    from types import SimpleNamespace

    class Model(torch.nn.Module):
        """A reward model whose logits are NaN for the first group."""

        def forward(self, **inputs: Any) -> Any:
            return SimpleNamespace(logits=torch.tensor([[NAN]] * 4 + [[value] for value in GOOD[4:]]))

    def score(trainer: Any) -> Any:
        return rollout(trainer, session, Model(), OTHER)

    tokenizer = lambda **_: {"input_ids": torch.zeros(8, 1, dtype=torch.long)}
    original = type(either)._calculate_rewards

    def calculate(*arguments: Any) -> Any:
        either.reward_processing_classes = [tokenizer, None]
        return original(either, *arguments)

    either._calculate_rewards = calculate
    found = score(either)
    assert found["advantages"][:4].eq(0).all()
    assert found["advantages"][4:].ne(0).all()
