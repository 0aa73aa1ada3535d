"""What a live trainer tells of how it computes, and which trainers are not traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.memory_cases import GRPO, facts
from support.tiny_trainers import tiny_trainer

from grpo_run.runtime.planning.computation import Computation, computation_of, refusals
from grpo_run.runtime.rank.memory_facts import collect_facts
from grpo_run.runtime.rank.trainer_facts import TrainerFacts

KNOWN = Computation(
    configuration={"model_type": "qwen2"}, weights="float32", attention="sdpa", optimizer="adamw_torch_fused"
)  # fmt: skip


def _asked(kind: str, folder: Path, peft: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return how a trainer of TRL computes, as it is read back from the reply, and why it is refused."""
    from peft import LoraConfig

    adapters = None if peft is None else LoraConfig(task_type="CAUSAL_LM", **peft)
    trainer = tiny_trainer(kind, folder, peft=adapters, **settings)
    computation = Computation.model_validate_json(computation_of(trainer).model_dump_json())
    return computation, list(refusals(collect_facts(trainer, TrainerFacts.of(trainer, 1)), computation))


@pytest.mark.parametrize("kind", ["GRPO", pytest.param("RLOO", marks=pytest.mark.full), "SFT"])
def test_a_plain_trainer_is_traced(kind: str, tmp_path: Path) -> None:
    """With the type and the kernels of its model."""
    computation, refused = _asked(kind, tmp_path)
    assert refused == []
    assert (computation.weights, computation.lora_rank, computation.special) == ("float32", 0, ())
    assert computation.configuration["model_type"]


def test_plain_adapters_are_traced_with_their_sizes(tmp_path: Path) -> None:
    """Not all parameters are trained then, which is no reason to refuse."""
    peft = {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    computation, refused = _asked("GRPO", tmp_path, peft, beta=0.1)
    assert refused == []
    assert (computation.lora_rank, computation.lora_targets) == (2, ("q_proj", "v_proj"))
    assert computation.lora_dropout == 0.1


@pytest.mark.parametrize(
    ("peft", "words"),
    [
        ({"r": 2, "use_dora": True}, "use_dora"),
        ({"r": 2, "target_modules": ".*q_proj"}, "names of modules"),
        ({"r": 2, "bias": "all"}, "bias"),
    ],
)
def test_adapters_other_than_plain_ones_are_refused(peft: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Their sizes would be those of another job."""
    assert any(words in reason for reason in _asked("GRPO", tmp_path, peft)[1])


def test_packed_rows_are_not_traced(tmp_path: Path) -> None:
    """They are joined to one row, whose kernels a trace for padded rows does not show."""
    refused = _asked("SFT", tmp_path, packing=True, packing_strategy="wrapped", max_length=32)[1]
    assert any("without padding" in reason for reason in refused)


@pytest.mark.parametrize(
    ("run", "computed", "words"),
    [
        ({"trainer": "transformers", "trainer_class": "Trainer"}, {}, "Trainer is not traced"),
        ({"overridden": ("compute_loss",)}, {}, "its own compute_loss"),
        ({"optimizer_offload": True}, {}, "in host memory"),
        ({}, {"special": ("adapters are not traced",)}, "adapters"),
        ({}, {"configuration": {}}, "no configuration"),
    ],
)
def test_what_cannot_be_traced_is_said(run: dict[str, Any], computed: dict[str, Any], words: str) -> None:
    assert list(refusals(GRPO, KNOWN)) == []
    assert any(words in reason for reason in refusals(facts(**run), KNOWN.model_copy(update=computed)))
