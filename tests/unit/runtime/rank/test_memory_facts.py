"""What real trainers of TRL tell of their memory, and what a script's own parts change."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_trainers import tiny, tiny_trainer

from grpo_run.runtime.features.memory_plan._configuration import apply
from grpo_run.runtime.memory.facts import MemoryFacts, split_refusals
from grpo_run.runtime.memory.files import read_facts
from grpo_run.runtime.memory.script_settings import OriginalSettings
from grpo_run.runtime.rank.memory_facts import collect_facts, publish_facts
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream import features
from grpo_run.runtime.upstream.trainer_kinds import trainer_kind


@functools.cache
def _built(kind: str) -> Any:
    settings = {"loss_type": "dr_grpo"} if kind == "GRPO" else {}
    made = tiny_trainer(kind, Path("out"), rows=20, gradient_accumulation_steps=2, **settings)
    apply(made.args, {})[1].keep(made.args)
    return made


def trainer_of(kind: str) -> Any:
    """Return a copy of a trainer that is built once, with its model."""
    made = copy.copy(_built(kind))
    made.args = copy.copy(made.args)
    return made


def facts(trainer: Any, world_size: int = 1) -> MemoryFacts:
    return collect_facts(trainer, TrainerFacts.of(trainer, world_size))


def publish(trainer: Any, session: Any) -> None:
    publish_facts(trainer, TrainerFacts.of(trainer, session.world_size), session)


def test_a_grpo_trainer_tells_its_sizes_its_loss_and_its_model() -> None:
    trainer = trainer_of("GRPO")
    found = facts(trainer)
    assert (found.trainer, found.loss_type, found.generates) == ("grpo", "dr_grpo", "transformers")
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (8, 2)
    assert (found.steps_per_generation, found.generation_batch_size) == (2, 16)
    assert (found.samples, found.layout, found.overridden, found.dropout) == (20, "ddp", (), False)
    assert found.supports_gradient_checkpointing
    assert split_refusals(found) == ()


def test_a_size_that_is_set_after_the_trainer_was_built_is_not_split() -> None:
    """A plan is applied when the trainer is built, so it would not take effect."""
    trainer = trainer_of("SFT")
    assert split_refusals(facts(trainer)) == ()
    trainer.args.per_device_train_batch_size = 16
    (refusal,) = split_refusals(facts(trainer))
    assert refusal == "the batch is also set by an assignment after SFTTrainer was built"
    assert not facts(trainer).checkpointing_set_later


def test_a_size_from_which_trl_has_derived_a_rollout_is_not_split() -> None:
    trainer = trainer_of("GRPO")
    trainer.args.per_device_train_batch_size = 16
    OriginalSettings(
        per_device_train_batch_size=16, gradient_accumulation_steps=2, gradient_checkpointing=False
    ).keep(trainer.args)
    (refusal,) = split_refusals(facts(trainer))
    assert refusal == "the batch is also set by an assignment after GRPOConfig was built"


def test_a_configuration_that_no_trainer_was_given_is_out_of_reach() -> None:
    """As one that a trainer makes itself."""
    trainer = trainer_of("SFT")
    del trainer.args._grpo_run_script_settings
    found = facts(trainer)
    assert found.explicit_sizes == ("SFTTrainer itself, which was given no configuration",)
    assert found.checkpointing_set_later


def test_rloo_and_sft_trainers_are_known_and_may_be_split() -> None:
    assert split_refusals(facts(trainer_of("RLOO"), world_size=2)) == ()
    sft = facts(trainer_of("SFT"), world_size=2)
    assert (sft.trainer, sft.loss_type, sft.generates, sft.counts_tokens) == ("sft", "nll", "", True)
    assert split_refusals(sft) == ()
    assert sft.has_ragged_batch


def test_what_a_script_computes_itself_is_named() -> None:
    trainer = trainer_of("GRPO")

    class Own(type(trainer)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    trainer.__class__ = Own
    trainer._prepare_inputs = lambda inputs: inputs[:1]
    assert facts(trainer).overridden == ("compute_loss", "_prepare_inputs")


def test_older_releases_of_trl_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO had a text in place of a function, and RLOO of 0.26 counted each micro-step twice."""
    grpo, rloo = trainer_of("GRPO"), trainer_of("RLOO")
    grpo.compute_loss_func = "non-None value to disable scaling"
    monkeypatch.setattr(features, "version", lambda name: "0.26.2")
    assert facts(grpo).overridden == ()
    assert facts(rloo).overridden == ("_step",)


def test_whether_vllm_gets_the_weights_again_after_it_has_slept_is_seen_in_its_object() -> None:
    """Before TRL 1.10 it has no such attribute, and before 0.28 there is no such object."""
    trainer = trainer_of("GRPO")
    assert not facts(trainer).vllm_wakes_with_weights
    trainer.vllm_generation = SimpleNamespace()
    assert not facts(trainer).vllm_wakes_with_weights
    trainer.vllm_generation = SimpleNamespace(_llm_weights_sleeping=False)
    assert facts(trainer).vllm_wakes_with_weights


def test_a_trainer_of_trl_that_is_not_known_is_no_plain_trainer() -> None:
    from trl import DPOTrainer

    assert trainer_kind(DPOTrainer) == ("other", None)


def test_sizes_that_deepspeed_is_given_are_explicit_and_auto_is_not(tmp_path: Path) -> None:
    trainer = trainer_of("SFT")
    given = {"train_batch_size": 16, "gradient_accumulation_steps": "auto"}
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(given))
    for value in (given, str(path)):
        trainer.args.deepspeed = value
        assert facts(trainer).explicit_sizes == ("train_batch_size in DeepSpeed's configuration",)


def test_dropout_is_seen_in_modules_and_in_attention() -> None:
    import torch

    trainer = trainer_of("SFT")
    trainer.model = copy.deepcopy(trainer.model)
    trainer.model.config.attention_dropout = 0.1
    assert facts(trainer).dropout
    trainer.model.config.attention_dropout = 0.0
    assert not facts(trainer).dropout
    trainer.model.extra = torch.nn.Dropout(0.1)
    assert facts(trainer).dropout


def test_the_first_rank_of_each_node_publishes_and_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    trainer = trainer_of("SFT")
    warned: list[str] = []

    def session(rank: int, folder: Path) -> Any:
        return SimpleNamespace(
            rank=rank, world_size=4, local_world_size=2, warn_in_journal=warned.append,
            config=SimpleNamespace(run_directory=folder),
        )  # fmt: skip

    publish(trainer, session(3, tmp_path))
    assert read_facts(tmp_path) is None
    publish(trainer, session(2, tmp_path))
    published = read_facts(tmp_path)
    assert published is not None
    assert published.trainer == "sft"
    publish(trainer, session(0, tmp_path / "absent"))
    assert len(warned) == 1


def test_a_divided_micro_batch_whose_update_is_not_the_same_is_said(tmp_path: Path) -> None:
    """A loss of the script's own shows only on the trainer."""
    trainer, warned = trainer_of("SFT"), list[str]()
    session = SimpleNamespace(
        rank=0, world_size=1, local_world_size=1, warn=warned.append,
        config=SimpleNamespace(run_directory=tmp_path),
    )  # fmt: skip
    trainer.compute_loss = lambda *args, **kwargs: 0.0
    publish(trainer, session)
    assert warned == []
    OriginalSettings(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        divided_by=2,
    ).keep(trainer.args)
    publish(trainer, session)
    (line,) = warned
    assert "has its own compute_loss" in line


def test_only_language_models_of_transformers_are_known_to_divide_by_the_tokens_of_the_step(
    tmp_path: Path,
) -> None:
    """transformers passes the count to every model that takes further keywords."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Own(torch.nn.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for model, expected in ((tiny().model(43, 1), True), (Own(1, 1), False)):
        trainer = Trainer(model, arguments, train_dataset=[])
        assert trainer.model_accepts_loss_kwargs
        assert facts(trainer).counts_tokens is expected


def test_a_trainer_like_no_other_is_trained_all_the_same(tmp_path: Path) -> None:
    """Its facts are of other types, or missing."""
    noted: list[str] = []
    session = SimpleNamespace(
        rank=0, world_size=1, local_world_size=1, warn_in_journal=noted.append,
        config=SimpleNamespace(run_directory=tmp_path),
    )  # fmt: skip
    trainer = trainer_of("SFT")
    trainer.args.loss_type = ["sigmoid", "sft"]  # as DPO's
    publish(trainer, session)
    assert noted == []
    for odd in (SimpleNamespace(args=SimpleNamespace()), SimpleNamespace()):
        publish(odd, session)
    trainer.args.max_completion_length = "many"
    publish(trainer, session)
    assert len(noted) == 3
