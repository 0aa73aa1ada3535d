"""For which trainers smaller micro-batches give the same update, and why not for others."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.memory.facts import (
    EXACT_GRPO_LOSSES,
    INEXACT_GRPO_LOSSES,
    MemoryFacts,
    split_differences,
    split_refusals,
)

SIZES: dict[str, Any] = {
    "trainer_class": "Any", "world_size": 2, "layout": "ddp",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1, "samples": 64,
}  # fmt: skip
GRPO = MemoryFacts(**SIZES, trainer="grpo", loss_type="dapo", generates="transformers")
RLOO = MemoryFacts(**SIZES, trainer="rloo", generates="transformers")
SFT = MemoryFacts(**SIZES, trainer="sft", loss_type="nll", counts_tokens=True)


@pytest.mark.parametrize(
    "facts", [*(GRPO.model_copy(update={"loss_type": one}) for one in EXACT_GRPO_LOSSES), RLOO, SFT]
)
def test_losses_that_are_means_over_samples_or_over_the_tokens_of_the_step_may_be_split(
    facts: MemoryFacts,
) -> None:
    assert split_refusals(facts) == ()
    assert split_differences(facts) == ()


@pytest.mark.parametrize(
    ("facts", "changed", "words"),
    [
        (GRPO, {"loss_type": "bnpo"}, "bnpo"),
        (GRPO, {"loss_type": "of_next_year"}, "of_next_year"),
        (GRPO, {"entropy_bonus": True}, "entropy"),
        (GRPO, {"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
        (GRPO, {"auxiliary_loss": True}, "experts"),
        (RLOO, {"auxiliary_loss": True}, "experts"),
        (GRPO, {"explicit_sizes": ("train_batch_size in DeepSpeed's configuration",)}, "train_batch_size"),
        (GRPO, {"overridden": ("compute_loss",)}, "compute_loss"),
        (GRPO, {"trainer": "other"}, "not known"),
        (SFT, {"counts_tokens": False}, "each micro-batch"),
        (SFT, {"averages_tokens_across_ranks": False}, "average_tokens_across_devices"),
        (SFT, {"loss_type": "of_next_year"}, "of_next_year"),
    ],
)
def test_what_a_split_would_change_is_refused_with_its_reason(
    facts: MemoryFacts, changed: dict[str, Any], words: str
) -> None:
    (reason,) = split_refusals(facts.model_copy(update=changed))
    assert words in reason


def test_one_rank_alone_averages_its_tokens_in_any_case() -> None:
    alone = {"averages_tokens_across_ranks": False, "world_size": 1}
    assert split_refusals(SFT.model_copy(update=alone)) == ()


def test_dropout_and_a_ragged_last_batch_are_differences_and_no_refusals() -> None:
    facts = SFT.model_copy(update={"dropout": True, "samples": 63})
    assert split_refusals(facts) == ()
    assert [text.split()[0] for text in split_differences(facts)] == ["dropout", "the"]


def test_every_loss_of_this_trl_is_in_one_of_the_lists() -> None:
    import inspect
    import re

    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    compared = re.findall(r"self\.loss_type (?:==|in) (\[[^\]]*\]|\"\w+\")", source)
    named = {name for text in compared for name in re.findall(r"\"(\w+)\"", text)}
    assert named == EXACT_GRPO_LOSSES | INEXACT_GRPO_LOSSES.keys()
