"""Reward functions: what they reward, and that they can be pickled."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.trainers.recipes.rewards import answer_format, correct_answer, correct_sum


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("42", 1),
        ("20+10=30,7+5=12,30+12=42", 1),
        ("30+12=42 ", 1),
        ("=42", 1),
        ("41", 0),
        ("420", 0),
        ("042", 0),
        ("", 0),
        ("30+12=", 0),
        ("42=30+12", 0),
        ("4 2", 0),
        ("40,42", 0),
        ("41=42=43", 0),
        ("-42", 0),
        ("٤٢", 0),
    ],
)
def test_only_the_correct_total_is_rewarded(completion: str, score: float) -> None:
    """The digits after the last `=` are the answer; the steps before them get no reward."""
    assert correct_sum([completion], total=[42], prompts=["27+15:"]) == [score]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#### 1,234", 1),
        ("1234", 0),
        ("#### 1233\n#### 1234", 1),
        ("#### 1234\n#### 1233", 0),
        ("#### 1234.001", 0),
        ("", 0),
    ],
)
def test_only_the_correct_answer_is_rewarded(completion: str, score: float) -> None:
    """Answers are compared as numbers, in text and in conversations."""
    chat = [{"role": "user", "content": "#### 1234"}, {"role": "assistant", "content": completion}]
    assert correct_answer([completion, chat], answer=["1234", "1234"], prompts=["", ""]) == [score, score]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("2+2=4\n#### 4", 1),
        ("#### 4", 1),
        ("so\n#### 4\n\n", 1),
        ("so #### 4.", 1),
        ("4", 0),
        ("#### four", 0),
        ("#### 4\nDone.", 0),
        ("#### 3\n#### 4", 0),
        ("#### 3 4", 0),
        ("####", 0),
        ("", 0),
    ],
)
def test_the_format_is_one_last_line_with_one_number(completion: str, score: float) -> None:
    """One `####`, one number, and nothing after it."""
    chat = [{"role": "assistant", "content": completion}]
    assert answer_format([completion, chat]) == [score, score]


@given(st.lists(st.text(max_size=60), max_size=5))
def test_any_completion_gets_one_reward(completions: list[str]) -> None:
    """One float between 0 and 1 per completion, whatever the text."""
    count = len(completions)
    for scores in (
        correct_sum(completions, total=[7] * count),
        correct_answer(completions, answer=["7"] * count),
        answer_format(completions),
    ):
        assert len(scores) == count
        assert all(type(score) is float and 0 <= score <= 1 for score in scores)


def test_a_column_of_another_length_is_an_error() -> None:
    """Otherwise rewards would be assigned to the wrong completions."""
    with pytest.raises(ValueError, match="zip"):
        correct_sum(["1", "2"], total=[1])
    with pytest.raises(ValueError, match="zip"):
        correct_answer(["1", "2"], answer=["1"])


@pytest.mark.parametrize("reward", [correct_sum, correct_answer, answer_format])
def test_rewards_can_be_pickled(reward: object) -> None:
    """They may run in another process."""
    assert pickle.loads(pickle.dumps(reward)) is reward
