"""Reward functions: what they reward, and that they can be pickled."""

from __future__ import annotations

import pickle
import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transcripts import Story, stories

from grpo_run.trainers.recipes.arithmetic import correct_sum
from grpo_run.trainers.rewards import answer_format, completion_text, correct_answer, final_answer


class RewardShell:
    """Rewards of a completion, in text and in a conversation."""

    def sum(self, completion: str) -> str:
        """For a total of 42."""
        return score(correct_sum([text_of(completion)], total=[42], prompts=["27+15:"]))

    def answer(self, completion: str) -> str:
        """For the answer 1234, after a question that has it."""
        chat = [{"role": "user", "content": "#### 1234"}, *said(completion)]
        return score(correct_answer([text_of(completion), chat], answer=["1234", "1234"], prompts=["", ""]))

    def format(self, completion: str) -> str:
        """For the format of GSM8K."""
        return score(answer_format([text_of(completion), said(completion)]))

    def final(self, completion: str) -> str:
        """The number after `####`."""
        return str(final_answer(text_of(completion)))


def text_of(word: str) -> str:
    """The text that a word of a story stands for."""
    return word.replace("\\n", "\n")


def said(completion: str) -> list[dict[str, str]]:
    """A conversation that ends with this."""
    return [{"role": "assistant", "content": text_of(completion)}]


def score(rewards: list[float]) -> str:
    """The reward, which is the same for all."""
    (one,) = set(rewards)
    return f"{one:g}"


@stories(__file__, "rewards.txt")
def test_rewards(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(RewardShell(), word)


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


@pytest.mark.parametrize("answer", ["1234", "1,234", 1234, 1234.0, "$1,234.00", "so\n#### 1,234"])
def test_a_reference_is_a_number_in_any_notation(answer: object) -> None:
    """Also a whole solution, as in the column of GSM8K."""
    assert correct_answer(["#### 1234"], answer=[answer]) == [1.0]


def test_a_reference_that_is_no_number_is_an_error() -> None:
    """A wrong column would otherwise be a reward of 0 for ever."""
    with pytest.raises(ValueError, match="'Paris' is no number"):
        correct_answer(["#### 1"], answer=["Paris"])


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("a", "a"),
        ([{"role": "assistant", "content": "a"}], "a"),
        ([{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}], "a"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a"),
        ([{"role": "assistant"}], ""),
        ([], ""),
    ],
)
def test_a_conversation_is_the_text_of_its_last_message(completion: Any, text: str) -> None:
    """As TRL passes them, with calls of tools and with parts."""
    assert completion_text(completion) == text


HOSTILE = [
    "1,111" * 20_000, "1," * 50_000, "1,234,567," * 10_000 + "8", "9" * 100_000, "#" * 100_000,
    "#### " * 20_000,
    "-" * 100_000, "$-" * 50_000, ". " * 50_000, "<answer>" * 12_500, "</think><think>" * 6_600,
    "=1" * 50_000 + "x", "=" * 100_000, " " * 100_000, "1" + " " * 99_998 + "x", "\u0661" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:9]))
def test_time_is_linear_in_the_length(text: str) -> None:
    """100,000 characters take milliseconds; a second leaves room for a busy machine, and none for squares."""
    started = time.process_time()
    for mark in ("", "#### ", "<think>"):
        correct_answer([mark + text], answer=["1"])
        answer_format([mark + text])
        correct_sum([mark + text], total=[1])
    assert time.process_time() - started < 1.0


@given(st.integers(-(10**18), 10**18), st.booleans(), st.sampled_from(["", "$"]), st.sampled_from(["", "."]))
def test_every_formatted_integer_is_parsed(number: int, commas: bool, sign: str, stop: str) -> None:
    """Of any size, with and without separators, currency and period."""
    written = f"{abs(number):,}" if commas else str(abs(number))
    minus = "-" if number < 0 else ""
    assert final_answer(f"so it is\n#### {minus}{sign}{written}{stop}") == number


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    """A model may generate anything, and a reward function that raises would end the run."""
    final_answer("####" + text)


def test_a_very_long_number_is_parsed_exactly() -> None:
    """Longer than Python's limit for converting integers."""
    assert final_answer("#### " + "9" * 5000) == Decimal("9" * 5000)
