"""A memory plan on TRL's own configurations: what it changes where a trainer is built, and the check at
`train()`.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl
from support.memory_cases import planned

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.memory_plan import _configuration as configuration
from grpo_run.runtime.features.memory_plan._remedy import Plan
from grpo_run.runtime.memory.script_settings import original_settings, record_of
from grpo_run.runtime.rank.resuming.identification import settings_digest

HALVED = planned(micro_batch_divisor=2)
Make = Callable[..., Any]


def build(plan: Plan, args: Any) -> Any:
    """Return a configuration as a trainer has it that is built with a plan."""
    return trainer_class(plan)(args=args).args


def trainer_class(plan: Plan, report: Any = lambda made, record: None) -> Any:
    """Return a class that stands for a trainer of TRL, built with a plan from now on."""

    class Trainer:
        def __init__(self, model: Any = None, args: Any = None) -> None:
            self.args = args

    class GRPOTrainer(Trainer):
        def __init__(self, model: Any = None, *, args: Any = None) -> None:
            super().__init__(model, args)

    configuration.install(Trainer, transformers.TrainingArguments, plan, report)
    return GRPOTrainer


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(kind: Any = trl.GRPOConfig, **settings: Any) -> Any:
        common = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 8,
            "use_cpu": True,
            "bf16": False,
        }
        rollouts = {"num_generations": 4} if kind in (trl.GRPOConfig, trl.RLOOConfig) else {}
        return kind(**{**common, **rollouts, "gradient_accumulation_steps": 3, "report_to": [], **settings})

    return build


def sizes(made: Any) -> tuple[Any, ...]:
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
    )
    return tuple(getattr(made, name, None) for name in names)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (4, 6, 6, 24)),
        ({"steps_per_generation": 5}, (4, 6, 10, 40)),
        ({"generation_batch_size": 16}, (4, 6, 4, 16)),
    ],
)
@pytest.mark.parametrize("kind", [trl.GRPOConfig, trl.RLOOConfig])
def test_the_micro_batch_is_halved_and_a_step_and_a_rollout_keep_their_samples(
    make: Make, kind: Any, settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert sizes(build(HALVED, make(kind, **settings))) == expected


def test_every_configuration_of_trl_and_transformers_is_changed(make: Make) -> None:
    for kind in (trl.SFTConfig, transformers.TrainingArguments):
        assert sizes(build(planned(micro_batch_divisor=4), make(kind)))[:2] == (2, 12)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (trl.GRPOConfig, {"loss_type": "bnpo"}, "bnpo"),
        (trl.GRPOConfig, {"entropy_coef": 0.1}, "entropy bonus"),
        (trl.GRPOConfig, {"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        (trl.DPOConfig, {}, "not known"),
        (trl.SFTConfig, {"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_a_loss_that_a_split_would_change_is_not_split_also_where_another_stage_is(
    make: Make, kind: Any, settings: dict[str, Any], words: str
) -> None:
    plan = planned(micro_batch_divisor=2, gradient_checkpointing=True)
    trainer = trainer_class(plan)(args=make(kind, **settings))
    assert sizes(trainer.args)[:2] == (8, 3)
    assert trainer.args.activation_checkpointing
    (warning,) = configuration.check(trainer, plan)
    assert words in warning


def test_deepspeeds_own_sizes_are_not_contradicted(make: Make) -> None:
    made = make(trl.SFTConfig)
    made.deepspeed = {"train_micro_batch_size_per_gpu": 8}
    planned = build(HALVED, made)
    assert (planned.per_device_train_batch_size, record_of(planned).divided_by) == (8, 1)
    assert "DeepSpeed" in record_of(planned).not_divided


def test_the_scripts_own_configuration_stays_as_it_is_and_can_be_used_again(
    make: Make, tmp_path: Path
) -> None:
    """By another trainer, and as the source of other configurations: nothing is divided twice."""
    trainer, first = trainer_class(HALVED), make(trl.SFTConfig)
    before = first.to_dict()
    assert sizes(trainer(args=first).args)[:2] == (4, 6)
    assert sizes(trainer(None, args=first).args)[:2] == (4, 6)
    assert first.to_dict() == before
    copied = dataclasses.replace(first, output_dir=str(tmp_path / "b"), per_device_train_batch_size=4)
    assert sizes(trainer(args=copied).args)[:2] == (2, 6)
    first.gradient_accumulation_steps = 6
    assert sizes(trainer(args=first).args)[:2] == (4, 12)


def test_what_a_script_sets_before_its_trainer_is_built_is_planned(make: Make) -> None:
    made = make(trl.SFTConfig)
    made.set_training(batch_size=16)
    assert sizes(build(HALVED, made))[:2] == (8, 2)


def test_a_trainer_that_makes_a_configuration_of_its_own_keeps_the_plan(make: Make) -> None:
    """As `SFTTrainer` does with plain arguments."""
    base = trainer_class(HALVED)

    class SFTTrainer(base):  # type: ignore[misc, valid-type]
        def __init__(self, args: Any) -> None:
            super().__init__(args=trl.SFTConfig(**{**args.to_dict(), "hub_token": None}))

    trainer = SFTTrainer(make(transformers.TrainingArguments))
    assert sizes(trainer.args)[:2] == (4, 6)
    assert record_of(trainer.args).per_device_train_batch_size == 8
    assert [*configuration.check(trainer, HALVED)] == []


def test_a_subclass_that_builds_the_configuration_itself_is_planned_inside(make: Make) -> None:
    base = trainer_class(HALVED)

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(args=make(trl.SFTConfig))

    assert sizes(Own().args)[:2] == (4, 6)


def test_a_copy_has_the_record_and_a_pickle_needs_nothing_of_ours(make: Make) -> None:
    made = build(HALVED, make(trl.SFTConfig))
    assert record_of(copy.deepcopy(made)) == record_of(made)
    assert b"grpo_run" not in pickle.dumps(made).replace(b"_grpo_run_script_settings", b"")


def test_gradient_checkpointing_is_turned_on_by_either_name(make: Make) -> None:
    plan = planned(gradient_checkpointing=True)
    for settings in ({"activation_checkpointing": False}, {"gradient_checkpointing": False}, {}):
        made = build(plan, make(transformers.TrainingArguments, **settings))
        assert made.activation_checkpointing
        assert not record_of(made).gradient_checkpointing
    assert record_of(build(plan, make(trl.SFTConfig))).gradient_checkpointing  # TRL's default
    with_fsdp = make(transformers.TrainingArguments, fsdp_config={"activation_checkpointing": True})
    assert not build(plan, with_fsdp).activation_checkpointing


def test_vllm_gets_its_share_and_sleeps(make: Make) -> None:
    made = build(planned(vllm_gpu_memory_utilization=0.2, vllm_sleep=True), make())
    assert (made.vllm_gpu_memory_utilization, made.vllm_enable_sleep_mode) == (0.2, True)
    assert original_settings(made)["vllm_gpu_memory_utilization"] == 0.3


def test_completions_are_as_long_as_the_plan_says_and_the_script_may_not_set_them_again(make: Make) -> None:
    """A configuration that has no such length is left alone."""
    plan = planned(max_completion_length=32)
    given = make(max_completion_length=64)
    trainer = trainer_class(plan)(args=given)
    assert [*configuration.check(trainer, plan)] == []
    assert trainer.args.max_completion_length == 32
    assert (given.max_completion_length, original_settings(trainer.args)["max_completion_length"]) == (64, 64)
    given.max_completion_length = 48
    with pytest.raises(ConfigError, match="GRPOTrainer has max_completion_length=48, not 32; set it before"):
        [*configuration.check(trainer, plan)]
    other = trainer_class(plan)(args=make(trl.SFTConfig))
    assert [*configuration.check(other, plan)] == []


def test_a_call_is_the_same_call_with_another_plan(make: Make) -> None:
    """Its settings are part of what it is recognized by when its directory has moved."""

    def digest(plan: Plan) -> str:
        made = build(plan, make(activation_checkpointing=False))
        return settings_digest(SimpleNamespace(args=made, train_dataset=[1]))

    without = digest({})
    for changed in (
        planned(micro_batch_divisor=4, gradient_checkpointing=True, vllm_sleep=True),
        planned(vllm_gpu_memory_utilization=0.1, max_completion_length=64),
    ):
        assert digest(changed) == without


def test_a_plan_that_took_effect_passes_the_check(make: Make) -> None:
    plan = planned(micro_batch_divisor=2, gradient_checkpointing=True)
    assert [*configuration.check(trainer_class(plan)(args=make()), plan)] == []
    assert [*configuration.check(SimpleNamespace(args=SimpleNamespace()), plan)] == []


def test_a_setting_that_the_script_sets_again_is_found(make: Make) -> None:
    """On the trainer, or on the configuration that it was given."""
    plan = planned(micro_batch_divisor=2, gradient_checkpointing=True)
    trainer = trainer_class(plan)(args=make())
    trainer.args.per_device_train_batch_size = 8
    with pytest.raises(ConfigError, match="has per_device_train_batch_size=8"):
        list(configuration.check(trainer, plan))
    given = make()
    trainer = trainer_class(plan)(args=given)
    given.activation_checkpointing = False
    with pytest.raises(ConfigError, match="gradient checkpointing turned off"):
        list(configuration.check(trainer, plan))


def test_what_else_the_script_sets_later_reaches_the_trainer(make: Make) -> None:
    """Its configuration is the script's own with a plan, too, as far as the script can tell."""
    given = make()
    trainer = trainer_class(HALVED)(args=given)
    given.learning_rate = 0.5
    trainer.args.max_steps = 7
    assert [*configuration.check(trainer, HALVED)] == []
    assert (trainer.args.learning_rate, trainer.args.max_steps) == (0.5, 7)
    assert sizes(trainer.args)[:2] == (4, 6)


def test_a_configuration_that_the_trainer_was_not_built_with_is_found(make: Make) -> None:
    trainer = trainer_class(HALVED)()
    trainer.args = make()
    with pytest.raises(ConfigError, match="not built with"):
        list(configuration.check(trainer, HALVED))


def test_a_batch_that_the_divisor_does_not_divide_is_divided_as_far_as_it_goes(make: Make) -> None:
    """Another stage of the script may have a smaller batch than the one that ran out of memory."""
    plan = planned(micro_batch_divisor=4)
    for batch, divided in ((6, (3, 6)), (1, (1, 3))):
        trainer = trainer_class(plan)(args=make(trl.SFTConfig, per_device_train_batch_size=batch))
        assert sizes(trainer.args)[:2] == divided
        (warning,) = configuration.check(trainer, plan)
        assert f"per_device_train_batch_size={batch}" in warning


def test_what_is_changed_is_reported_and_without_a_plan_nothing_is_copied(make: Make) -> None:
    reported: list[int] = []
    trainer_class(HALVED, lambda made, record: reported.append(record.divided_by))(args=make())
    given = make()
    assert trainer_class({}, lambda made, record: reported.append(1))(args=given).args is given
    assert reported == [2]


class DeepSpeedSettings:
    """Stands for accelerate's `HfDeepSpeedConfig`."""

    def __init__(self, **config: Any) -> None:
        self.config, self.read = config, 0

    def set_stage_and_offload(self) -> None:
        self.read += 1


OFFLOADED = planned(optimizer_offload=True)


def offload(make: Make, **config: Any) -> Any:
    """Return DeepSpeed's plugin of a trainer that is built with its optimizer offloaded."""
    given = make(trl.SFTConfig)
    given.deepspeed_plugin = SimpleNamespace(
        hf_ds_config=DeepSpeedSettings(**config), deepspeed_config=config, offload_optimizer_device=None
    )
    trainer = trainer_class(OFFLOADED)(args=given)
    trainer.accelerator = SimpleNamespace(state=trainer.args)
    assert [*configuration.check(trainer, OFFLOADED)] == []
    return trainer.args.deepspeed_plugin


def test_the_optimizer_is_offloaded_where_deepspeed_has_zero(make: Make) -> None:
    plugin = offload(make, zero_optimization={"stage": 3, "offload_optimizer": {"device": "none"}})
    settings = plugin.hf_ds_config
    assert settings.config["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert (plugin.offload_optimizer_device, settings.read) == ("cpu", 1)
    without = offload(make, train_batch_size="auto").hf_ds_config
    assert (without.read, without.config["train_batch_size"]) == (0, "auto")


def test_the_optimizer_of_the_run_stays_unless_deepspeed_builds_it(make: Make) -> None:
    """accelerate replaces it by DeepSpeed's own if this is not set, and that one cannot load the run's
    state.
    """
    zero = {"zero_optimization": {"stage": 3}}
    assert offload(make, **zero).deepspeed_config["zero_force_ds_cpu_optimizer"] is False
    built = offload(make, **zero, optimizer={"type": "AdamW"}).deepspeed_config
    assert "zero_force_ds_cpu_optimizer" not in built
