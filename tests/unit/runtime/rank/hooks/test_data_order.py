"""Who is warned of data that is not shuffled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOTrainer, SFTConfig, SFTTrainer

from grpo_run.runtime.rank.hooks.train_call import order_warning
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream import trainer_names


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"shuffle_dataset": True}, False), ({}, False), ({"shuffle_dataset": False}, True)],
)
def test_a_trainer_that_generates_is_warned_of_data_in_a_fixed_order(
    settings: dict[str, bool], warned: bool
) -> None:
    """Not one that does not say whether it shuffles, nor SFT: its sampler is random in any case."""
    arguments = SimpleNamespace(**settings)
    generating: Any = SimpleNamespace(args=arguments, **{trainer_names.GENERATE: None})
    text = order_warning(generating, TrainerFacts.of(generating, 2)) or ""
    assert ("shuffle_dataset=False: each rank takes a fixed part" in text) == warned
    tuning = SimpleNamespace(args=arguments)
    assert order_warning(tuning, TrainerFacts.of(tuning, 2)) is None
    assert SFTConfig.shuffle_dataset is False
    assert hasattr(GRPOTrainer, trainer_names.GENERATE)
    assert not hasattr(SFTTrainer, trainer_names.GENERATE)
