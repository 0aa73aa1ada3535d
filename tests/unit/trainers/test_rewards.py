"""Reward functions: what they reward, and that they can be pickled."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.trainers.recipes.arithmetic import correct_sum
from grpo_run.trainers.rewards import (
    answer_format,
    completion_text,
    correct_answer,
    correct_number,
    repetition,
    short_completion,
    soft_overlong,
    xml_format,
)


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


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("so it is 1,234", 1),
        ("1234", 1),
        ("<think>1 or 2</think><answer>$1,234.00</answer>", 1),
        ("\\boxed{1234}", 1),
        ("7, then 1234.", 1),
        ("1234, or 7", 0),
        ("1 234", 0),
        ("１２３４", 0),
        ("-1234", 0),
        ("−1234", 0),
        ("none", 0),
        ("", 0),
    ],
)
def test_the_last_number_is_the_answer(completion: str, score: float) -> None:
    """Of several, the last one counts, so that a list of candidates is one guess."""
    assert correct_number([completion], answer=["1234"]) == [score]


@pytest.mark.parametrize("answer", ["1234", "1,234", 1234, 1234.0, "$1,234.00", "so\n#### 1,234"])
def test_a_reference_is_a_number_in_any_notation(answer: object) -> None:
    """Also a whole solution, as in the column of GSM8K."""
    assert correct_answer(["#### 1234"], answer=[answer]) == [1.0]
    assert correct_number(["1234"], answer=[answer]) == [1.0]


def test_a_reference_that_is_no_number_is_an_error() -> None:
    """A wrong column would otherwise be a reward of 0 for ever."""
    with pytest.raises(ValueError, match="'Paris' is no number"):
        correct_answer(["#### 1"], answer=["Paris"])


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>4</answer>", 1),
        ("\n<think>\nüber\n</think>\n\n<answer>4</answer>\n", 1),
        ("<think>a < b > c</think><answer><b>4</b></answer>", 1),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><answer>4", 0),
        ("<think>a<answer>4</answer></think>", 0),
        ("<think>a<answer>b</think>4</answer>", 0),
        ("<think><think>a</think></think><answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer><answer>4</answer>", 0),
        ("</think>a<think><answer>4</answer>", 0),
        ("<think> </think><answer>4</answer>", 0),
        ("<Think>a</Think><answer>4</answer>", 0),
        ("so <think>a</think><answer>4</answer>", 0),
        ("<think>a</think> so <answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer> done", 0),
        ("", 0),
    ],
)
def test_elements_are_complete_and_in_order(completion: str, score: float) -> None:
    """Nested, repeated, unclosed and empty ones get nothing, and neither does text around them."""
    assert xml_format("think", "answer")([completion, [{"content": completion}]]) == [score, score]


def test_lengths_are_rewarded_linearly() -> None:
    """Soft overlong as in DAPO: free until the cache, -1 from the limit on."""
    ids = [[0] * count for count in (0, 60, 80, 90, 100, 120)]
    assert soft_overlong(100, cache=20)(completion_ids=ids, completions=[]) == [0, 0, 0, -0.5, -1, -1]
    assert short_completion(100)(completion_ids=ids, completions=[]) == pytest.approx(
        [1, 0.4, 0.2, 0.1, 0, 0]
    )


def test_repeated_sequences_of_tokens_are_counted() -> None:
    """Of 5 sequences of 2 tokens, 3 repeat others; short completions have none."""
    score = repetition(2)
    assert score(completion_ids=[[1, 1, 1, 1, 1, 1], [1, 2, 3], [1], []], completions=[]) == [-0.8, 0, 0, 0]
    assert score(completion_ids=[[1, 2, 1, 2, 1, 2]], completions=[]) == pytest.approx([-0.6])


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


def test_functions_are_logged_under_names_of_their_own() -> None:
    """TRL takes `__name__`."""
    made = [xml_format("a"), short_completion(9), soft_overlong(9, cache=1), repetition()]
    assert [one.__name__ for one in made] == ["xml_format", "short_completion", "soft_overlong", "repetition"]


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
        correct_number([mark + text], answer=["1"])
        answer_format([mark + text])
        xml_format("think", "answer")([mark + text])
        correct_sum([mark + text], total=[1])
    repetition()(completion_ids=[list(text.encode())])
    assert time.process_time() - started < 1.0
