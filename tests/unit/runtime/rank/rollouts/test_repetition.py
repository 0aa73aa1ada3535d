"""Loops are found within three periods and a window; real text is not taken for one."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.rollouts.limits import MAX_PERIOD, Repetition

GSM8K = Path(os.environ.get("GRPO_RUN_GSM8K") or Path(__file__).parents[6] / "shared/data/gsm8k")
VOCABULARY = 50_000


def found_at(completion: list[int], prompt: list[int] | None = None, *, window: int = 64) -> int | None:
    """Return after how many tokens a completion is found to loop, if they come one by one."""
    prompt = prompt or []
    repetition = Repetition(len(prompt), window=window)
    tokens = torch.tensor([prompt + completion])
    for length in range(1, len(completion) + 1):
        if repetition(tokens[:, : len(prompt) + length]).item():
            return length
    return None


def different(count: int, *, seed: int = 0) -> list[int]:
    """Return random tokens."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]


@given(
    period=st.integers(1, MAX_PERIOD),
    before=st.integers(0, 300),
    window=st.sampled_from([8, 9, 31, 64, 70, 128]),
    seed=st.integers(0, 99),
)
def test_every_loop_is_found_within_three_periods_and_a_window(
    period: int, before: int, window: int, seed: int
) -> None:
    """Wherever it begins."""
    looped = different(period, seed=seed + 1)
    completion = different(before, seed=seed) + (looped * 2000)[: 3 * period + window]
    found = found_at(completion, window=window)
    assert found is not None
    assert found > before + period  # not before anything was repeated


@pytest.mark.parametrize("window", [8, 64, 128])
def test_a_loop_shorter_than_the_window_is_no_loop(window: int) -> None:
    """The lower limit is the window less two blocks."""
    completion = different(100) + [7] * (window // 2) + different(300, seed=1)
    assert found_at(completion, window=window) is None


def test_a_passage_repeated_once_is_no_loop() -> None:
    """A question restated in the answer, or a function written twice."""
    passage = different(200)
    assert found_at(passage + passage + different(300, seed=1)) is None


@pytest.mark.parametrize("period", [24, 60, 100, 200, 256])
def test_a_loop_with_a_counter_is_found(period: int) -> None:
    """A token of each period changes, and after nine the counter has one token more."""
    body = different(period - 2)
    completion: list[int] = []
    number = 0
    while len(completion) < 4 * 64 + 6 * period:
        completion += [*body, 40_000 + number % 10, 41_000 + number // 10]
        number += 1
    found = found_at(completion)
    assert found is not None
    assert found <= 3 * period + 4 * 64 + 32


def test_a_copy_of_the_prompt_is_no_loop() -> None:
    """The prompt is not compared: a few-shot prompt repeats its form on purpose."""
    example = different(40)
    assert found_at(different(20) + example, prompt=example * 8) is None


def test_rows_are_judged_one_by_one() -> None:
    """A loop in one row ends no other; what was found stays found."""
    rows = [different(600, seed=1), [5, 6, 7] * 200, different(300, seed=2) + [9] * 300]
    repetition = Repetition(0, window=64)
    tokens = torch.tensor(rows)
    seen = [repetition(tokens[:, :length]).tolist() for length in range(1, 601)]
    assert seen[250] == [False, True, False]
    assert seen[-1] == [False, True, True]


@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_it_makes_no_difference_how_many_tokens_come_at_once(seed: int, sizes: list[int]) -> None:
    """As with speculative decoding, where a step yields several."""
    source = random.Random(seed)
    total = sum(sizes)
    rows = [([source.randrange(3) for _ in range(source.randrange(1, 9))] * total)[:total] for _ in range(4)]
    one_by_one, in_parts, at = Repetition(0, window=8), Repetition(0, window=8), 0
    for size in sizes:
        for length in range(at + 1, at + size + 1):
            expected = one_by_one(torch.tensor(rows)[:, :length])
        at += size
        assert in_parts(torch.tensor(rows)[:, :at]).tolist() == expected.tolist()


def test_another_batch_is_refused() -> None:
    """Its rows are other completions."""
    repetition = Repetition(0)
    repetition(torch.tensor([[1], [2]]))
    with pytest.raises(UsageError, match="1 completions after 2"):
        repetition(torch.tensor([[1, 2]]))
    with pytest.raises(UsageError, match="at least 8"):
        Repetition(0, window=4)


@pytest.mark.skipif(
    not (GSM8K / "train.jsonl").is_file(), reason="GSM8K was not found; set GRPO_RUN_GSM8K to its directory"
)
def test_solutions_of_gsm8k_are_no_loops() -> None:
    """At most one of a thousand; every seventh solution, in words and marks. The benchmark takes all."""
    with open(GSM8K / "train.jsonl", encoding="utf-8") as file:
        solutions = [json.loads(line)["answer"] for line in file][::7]
    numbers: dict[str, int] = {}
    rows = [
        [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)]
        for text in solutions
    ]
    longest = max(map(len, rows))
    # what follows the solution does not repeat itself
    padded = [row + list(range(10**6, 10**6 + longest - len(row))) for row in rows]
    stopped = sum(
        int(Repetition(0)(torch.tensor(padded[first : first + 128])).sum())
        for first in range(0, len(padded), 128)
    )
    assert len(solutions) > 1000
    assert stopped <= len(solutions) / 1000
