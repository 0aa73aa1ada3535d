"""A line of a ledger survives a kill at any place, and is short."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.features.ledger._lines import (
    append,
    pack,
    prompt_digest,
    read_lines,
    row_digest,
    unpack,
)


@pytest.mark.parametrize("lengths", [[], [0], [1, 127, 128, 16_383, 16_384, 3_000_000]])
def test_lengths_come_back(lengths: list[int]) -> None:
    """Of any size."""
    assert unpack(pack(lengths)) == lengths


def test_lengths_that_were_cut_are_refused() -> None:
    """The last byte says that another follows."""
    with pytest.raises(ValueError, match="not complete"):
        unpack("fB")


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_line_that_was_cut_costs_no_other(tmp_path: Path, cut: int) -> None:
    """The next attempt writes after it."""
    file = tmp_path / "rank0.jsonl"
    append(file, "S", 1, 0, 1)
    whole = file.read_bytes()
    append(file, "S", 2, 1, 2)
    file.write_bytes(file.read_bytes()[: len(whole) + cut])
    append(file, "S", 2, 1, 2)
    assert list(read_lines(file)) == [["S", 1, 0, 1], ["S", 2, 1, 2]]


def test_a_prompt_with_32_completions_takes_less_than_100_bytes(tmp_path: Path) -> None:
    """Late in a long run, with long completions."""
    file = tmp_path / "rank0.jsonl"
    append(file, "R", 100_000, 12, 100_001, prompt_digest("x") * 8, pack([16_000] * 32 * 8))
    for step in range(2):
        append(file, "S", 100_001 + step, 800_000, 800_001)
    assert file.stat().st_size / 8 < 100


def test_digests_tell_prompts_apart() -> None:
    """Not by other columns, unless there is no prompt."""
    assert row_digest({"prompt": "x", "answer": 1}) == row_digest({"prompt": "x", "answer": 2})
    assert row_digest({"prompt": "x"}) != row_digest({"prompt": "y"})
    assert row_digest({"environment": "x"}) != row_digest({"environment": "y"})
    assert row_digest({"prompt": [{"content": object()}]}) == row_digest({"prompt": [{"content": object()}]})
