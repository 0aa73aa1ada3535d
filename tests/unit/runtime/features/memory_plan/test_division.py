"""The memory plan divides the generation of a turn, where that is possible and every rank does the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_run.runtime.features.memory_plan.rank import in_sub_batches


def test_what_cannot_be_divided_is_said_once() -> None:
    """Such as what a model generates in its own way; one row cannot be divided, and nothing is said."""
    said = list[str]()
    divide = in_sub_batches(SimpleNamespace(), 2, sharded=False, warn=said.append)
    assert divide is not None
    assert divide(lambda: [[1]]) == [[1]]
    assert said == []
    for _ in range(2):
        assert divide(lambda: ([[1], [2]], None)) == ([[1], [2]], None)
    (line,) = said
    assert "2 parts" in line


@pytest.mark.parametrize(
    ("trainer", "count", "sharded", "divides"),
    [
        ({}, 1, False, False),
        ({"use_vllm": True}, 2, False, False),
        ({"tools": [len]}, 2, True, False),  # each call is collective, and not every rank has such a turn
        ({"tools": [len]}, 2, False, True),
        ({"tools": []}, 2, True, True),
    ],
)
def test_turns_stay_whole_where_parts_would_not_fit(
    trainer: dict[str, object], count: int, sharded: bool, divides: bool
) -> None:
    found = in_sub_batches(SimpleNamespace(**trainer), count, sharded=sharded, warn=pytest.fail)
    assert (found is not None) is divides
