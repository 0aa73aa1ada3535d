"""In which order a trainer reads its data, and who is warned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOTrainer, SFTConfig, SFTTrainer

from grpo_run.runtime.rank.hooks.train_call import ReadingOrder, data_order, warning
from grpo_run.runtime.upstream import trainer_names

RISING = [{"prompt": "x" * length} for length in range(1, 300)]
MIXED = [{"prompt": "x" * (37 * number % 101)} for number in range(300)]


class Generating(SimpleNamespace):
    """A trainer that generates, as those of GRPO and RLOO."""

    def _generate(self) -> None:
        raise AssertionError


def trainer(
    rows: list[dict[str, Any]], *, shuffles: bool | None, kind: type[SimpleNamespace] = Generating
) -> Any:
    """A trainer of these rows."""
    args = SimpleNamespace() if shuffles is None else SimpleNamespace(shuffle_dataset=shuffles)
    return kind(args=args, train_dataset=Dataset.from_list(rows))


def test_a_trainer_that_does_not_generate_is_not_warned_of_its_shuffling() -> None:
    """SFT's setting is off by default and its sampler is random; there are no completions to wait for."""
    sft = trainer(RISING, shuffles=SFTConfig.shuffle_dataset, kind=SimpleNamespace)
    assert SFTConfig.shuffle_dataset is False
    assert data_order(sft) is ReadingOrder.unknown
    assert hasattr(GRPOTrainer, trainer_names.GENERATE)
    assert not hasattr(SFTTrainer, trainer_names.GENERATE)


@pytest.mark.parametrize(
    ("rows", "shuffles", "expected"),
    [
        (RISING, True, ReadingOrder.shuffled),
        (RISING, None, ReadingOrder.unknown),
        (RISING, False, ReadingOrder.sorted_by_length),
        (RISING[::-1], False, ReadingOrder.sorted_by_length),
        (MIXED, False, ReadingOrder.kept),
        ([{"prompt": "same"}] * 50, False, ReadingOrder.kept),
        ([{"other": 1}] * 50, False, ReadingOrder.kept),
    ],
)
def test_the_order_is_found(
    rows: list[dict[str, Any]], shuffles: bool | None, expected: ReadingOrder
) -> None:
    """From TRL's own setting, and a look at the lengths."""
    assert data_order(trainer(rows, shuffles=shuffles)) is expected


def test_a_data_set_without_rows_or_length_is_not_looked_at() -> None:
    """A stream, or none at all."""
    stream = Generating(args=SimpleNamespace(shuffle_dataset=False), train_dataset=iter(()))
    assert data_order(stream) is ReadingOrder.kept
    stream.train_dataset = None
    assert data_order(stream) is ReadingOrder.kept


def test_only_an_order_that_is_kept_is_warned_of() -> None:
    """With the reason."""
    assert warning(ReadingOrder.shuffled) is None
    assert warning(ReadingOrder.unknown) is None
    assert "shuffle_dataset=False: each rank takes a fixed part" in (warning(ReadingOrder.kept) or "")
    assert "sorted by length" in (warning(ReadingOrder.sorted_by_length) or "")


def test_a_transform_is_not_run() -> None:
    """It may draw random numbers, which would change the run."""

    def fails(rows: Any) -> Any:
        raise AssertionError("the transform ran")

    made = trainer(RISING, shuffles=False)
    made.train_dataset = made.train_dataset.with_transform(fails)
    assert data_order(made) is ReadingOrder.sorted_by_length
