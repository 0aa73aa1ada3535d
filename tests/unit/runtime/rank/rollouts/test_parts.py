"""A call of `generate` is divided by rows, and its results are joined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.rank.rollouts.generate_calls import divided, joined

IDS = torch.arange(12).reshape(6, 2)


@given(rows=st.integers(1, 40), count=st.integers(1, 50))
def test_every_row_is_in_one_part_and_parts_differ_by_one_row_at_most(rows: int, count: int) -> None:
    ids = torch.arange(rows).reshape(rows, 1)
    parts = divided(
        {"self": None, "kwargs": {"input_ids": ids, "attention_mask": ids, "use_cache": True}}, count
    )
    if min(rows, count) < 2:
        assert parts is None
        return
    assert parts is not None
    assert len(parts) == min(rows, count)
    found = [part["kwargs"]["input_ids"] for part in parts]
    assert torch.equal(torch.cat(found), ids)
    lengths = {len(one) for one in found}
    assert max(lengths) - min(lengths) <= 1
    assert all(torch.equal(part["kwargs"]["attention_mask"], part["kwargs"]["input_ids"]) for part in parts)
    assert all(part["kwargs"]["use_cache"] for part in parts)


def test_images_and_rows_of_another_number_are_not_divided() -> None:
    image = {"input_ids": IDS, "pixel_values": torch.zeros(6, 3)}
    assert divided({"kwargs": image}, 2) is None
    assert divided({"kwargs": {"input_ids": IDS, "attention_mask": IDS[:5]}}, 2) is None
    assert divided({"kwargs": {"prompt": "text"}}, 2) is None


def test_the_first_argument_may_have_the_prompts() -> None:
    parts = divided({"inputs": IDS, "generation_config": "any"}, 3)
    assert parts is not None
    assert [len(part["inputs"]) for part in parts] == [2, 2, 2]
    assert parts[0]["generation_config"] == "any"


def joined_with(pad: Any, eos: Any) -> list[list[int]]:
    settings = SimpleNamespace(pad_token_id=pad, eos_token_id=eos)
    results = [torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 8]])]
    return joined(results, {"generation_config": settings}).tolist()


def test_shorter_parts_are_filled_up_as_generate_fills_up_rows_that_have_ended() -> None:
    assert joined_with(0, 1) == [[5, 6, 7, 0], [5, 6, 7, 8]]
    assert joined_with(None, 1)[0] == [5, 6, 7, 1]
    assert joined_with(None, [2, 3])[0] == [5, 6, 7, 2]
