"""A memory plan on TRL's own configurations: what it changes, rebuilt configurations, and the check at `train()`."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.rank.memory_plan import configuration
from grpo_run.runtime.rank.memory_plan.settings import original_settings, record_of
from grpo_run.runtime.rank.resuming.identification import settings_digest

HALVED = MemoryPlan(micro_batch_divisor=2)
Make = Callable[..., Any]


@pytest.fixture
def planned() -> Iterator[Callable[[MemoryPlan], None]]:
    """Applies a plan to all configurations that are built from then on, until the test ends."""
    original, replace = transformers.TrainingArguments.__post_init__, dataclasses.replace

    def plan(plan: MemoryPlan) -> None:
        transformers.TrainingArguments.__post_init__, dataclasses.replace = original, replace
        configuration.install(transformers.TrainingArguments, plan)

    yield plan
    transformers.TrainingArguments.__post_init__, dataclasses.replace = original, replace


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
    planned: Any, make: Make, kind: Any, settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    planned(HALVED)
    assert sizes(make(kind, **settings)) == expected


def test_every_configuration_of_trl_and_transformers_is_changed(planned: Any, make: Make) -> None:
    planned(MemoryPlan(micro_batch_divisor=4))
    for kind in (trl.SFTConfig, transformers.TrainingArguments):
        assert sizes(make(kind))[:2] == (2, 12)


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
    planned: Any, make: Make, kind: Any, settings: dict[str, Any], words: str
) -> None:
    plan = MemoryPlan(micro_batch_divisor=2, gradient_checkpointing=True)
    planned(plan)
    made = make(kind, **settings)
    assert sizes(made)[:2] == (8, 3)
    assert made.activation_checkpointing
    warning = configuration.check(trainer_with(made), plan)
    assert warning is not None
    assert words in warning


def test_deepspeeds_own_sizes_are_not_contradicted(planned: Any) -> None:
    plan = MemoryPlan(micro_batch_divisor=2)

    class Arguments:
        output_dir, per_device_train_batch_size, gradient_accumulation_steps = "out", 4, 1
        activation_checkpointing = None
        deepspeed = {"train_micro_batch_size_per_gpu": 4}  # noqa: RUF012

        def __post_init__(self) -> None:
            """Nothing to validate."""

    Arguments.__module__, Arguments.__qualname__ = "transformers.training_args", "TrainingArguments"
    Arguments.__name__ = "TrainingArguments"
    configuration.install(Arguments, plan)
    made: Any = Arguments()
    made.__post_init__()
    assert (made.per_device_train_batch_size, record_of(made).divided_by) == (4, 1)
    assert "DeepSpeed" in record_of(made).not_divided


def test_a_configuration_that_is_built_again_is_not_divided_twice(planned: Any, make: Make) -> None:
    """As `SFTTrainer` does with plain arguments, and scripts with `replace`."""
    planned(HALVED)
    plain = make(transformers.TrainingArguments)
    again = trl.SFTConfig(**{**plain.to_dict(), "hub_token": None})
    assert sizes(again)[:2] == (4, 6)
    assert record_of(again) == record_of(plain)
    assert sizes(dataclasses.replace(again, learning_rate=1.0))[:2] == (4, 6)
    # the accumulation comes from the first one, the batch from the script
    assert sizes(dataclasses.replace(again, per_device_train_batch_size=16))[:2] == (8, 6)
    first = make()
    rebuilt = dataclasses.replace(first, generation_batch_size=None)
    assert sizes(rebuilt) == sizes(first)


def test_a_copy_for_another_directory_is_not_divided_twice(planned: Any, make: Make, tmp_path: Path) -> None:
    planned(HALVED)
    first = make(trl.SFTConfig)
    assert sizes(dataclasses.replace(first, output_dir=str(tmp_path / "b")))[:2] == (4, 6)
    passed_on = {one.name: getattr(first, one.name) for one in dataclasses.fields(first) if one.init}
    copied = trl.SFTConfig(**{**passed_on, "output_dir": str(tmp_path / "c"), "learning_rate": 1.0})
    assert sizes(copied)[:2] == (4, 6)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 6), (4, 3), (4, 6)])
def test_a_replaced_size_that_equals_a_planned_one_is_the_scripts_own(
    planned: Any, make: Make, batch: int, accumulation: int
) -> None:
    planned(HALVED)
    changes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    changes = {name: value for name, value in changes.items() if value not in (8, 3)}
    replaced = dataclasses.replace(make(), **changes, steps_per_generation=None, generation_batch_size=None)
    halved, doubled = batch // 2, accumulation * 2
    assert sizes(replaced) == (halved, doubled, doubled, batch * accumulation)


@pytest.mark.parametrize("directory", ["out", "b"])
def test_equal_sizes_of_a_configuration_of_its_own_are_the_scripts_own(
    planned: Any, make: Make, tmp_path: Path, directory: str
) -> None:
    """A script that halves its own batch, as accelerate's `find_executable_batch_size` does."""
    planned(HALVED)
    make(trl.SFTConfig)
    output = str(tmp_path / directory)
    for batch, accumulation in ((4, 6), (4, 3), (2, 3)):
        other = make(
            trl.SFTConfig,
            output_dir=output,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        assert sizes(other)[:2] == (batch // 2, accumulation * 2)


def test_a_copy_has_the_record_and_a_pickle_needs_nothing_of_ours(planned: Any, make: Make) -> None:
    planned(HALVED)
    made = make(trl.SFTConfig)
    assert record_of(copy.deepcopy(made)) == record_of(made)
    assert b"grpo_run.trainers" not in pickle.dumps(made)


def test_gradient_checkpointing_is_turned_on_by_either_name(planned: Any, make: Make) -> None:
    planned(MemoryPlan(gradient_checkpointing=True))
    off = {"activation_checkpointing": False}, {"gradient_checkpointing": False}, {}
    for settings in off:
        made = make(transformers.TrainingArguments, **settings)
        assert made.activation_checkpointing
        assert not record_of(made).gradient_checkpointing
    assert record_of(make(trl.SFTConfig)).gradient_checkpointing  # TRL's default
    with_fsdp = make(transformers.TrainingArguments, fsdp_config={"activation_checkpointing": True})
    assert not with_fsdp.activation_checkpointing


def test_vllm_gets_its_share_and_sleeps(planned: Any, make: Make) -> None:
    planned(MemoryPlan(vllm_gpu_memory_utilization=0.2, vllm_sleep=True))
    made = make()
    assert (made.vllm_gpu_memory_utilization, made.vllm_enable_sleep_mode) == (0.2, True)
    assert original_settings(made)["vllm_gpu_memory_utilization"] == 0.3


def test_a_call_is_the_same_call_with_another_plan(planned: Any, make: Make) -> None:
    """Its settings are part of what it is recognized by when its directory has moved."""

    def digest() -> str:
        return settings_digest(SimpleNamespace(args=make(activation_checkpointing=False), train_dataset=[1]))

    without = digest()
    planned(MemoryPlan(micro_batch_divisor=4, gradient_checkpointing=True, vllm_sleep=True))
    assert digest() == without
    planned(MemoryPlan(vllm_gpu_memory_utilization=0.1))
    assert digest() == without


def trainer_with(args: Any) -> Any:
    return type("GRPOTrainer", (), {"args": args})()


def test_a_plan_that_took_effect_passes_the_check(planned: Any, make: Make) -> None:
    plan = MemoryPlan(micro_batch_divisor=2, gradient_checkpointing=True)
    planned(plan)
    assert configuration.check(trainer_with(make()), plan) is None
    assert configuration.check(trainer_with(SimpleNamespace()), plan) is None


def test_a_setting_that_the_script_sets_again_is_found(planned: Any, make: Make) -> None:
    plan = MemoryPlan(micro_batch_divisor=2, gradient_checkpointing=True)
    planned(plan)
    made = make()
    made.per_device_train_batch_size = 8
    with pytest.raises(ConfigError, match="has per_device_train_batch_size=8"):
        configuration.check(trainer_with(made), plan)
    made = make()
    made.activation_checkpointing = False
    with pytest.raises(ConfigError, match="gradient checkpointing turned off"):
        configuration.check(trainer_with(made), plan)


def test_a_configuration_that_was_not_built_here_is_found(make: Make) -> None:
    with pytest.raises(ConfigError, match="not built in this process"):
        configuration.check(trainer_with(make()), HALVED)


def test_a_batch_that_the_divisor_does_not_divide_is_divided_as_far_as_it_goes(
    planned: Any, make: Make
) -> None:
    """Another stage of the script may have a smaller batch than the one that ran out of memory."""
    plan = MemoryPlan(micro_batch_divisor=4)
    planned(plan)
    for batch, divided in ((6, (3, 6)), (1, (1, 3))):
        made = make(trl.SFTConfig, per_device_train_batch_size=batch)
        assert sizes(made)[:2] == divided
        warning = configuration.check(trainer_with(made), plan)
        assert warning is not None
        assert f"per_device_train_batch_size={batch}" in warning


def test_what_is_changed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataclasses, "replace", dataclasses.replace)
    reported: list[int] = []

    class Arguments:
        output_dir, per_device_train_batch_size, gradient_accumulation_steps = "out", 4, 1
        activation_checkpointing = None

        def __post_init__(self) -> None:
            assert self.per_device_train_batch_size == 2

    Arguments.__module__, Arguments.__name__ = "trl.trainer.sft_config", "SFTConfig"
    Arguments.loss_type = "nll"  # type: ignore[attr-defined]
    configuration.install(Arguments, HALVED, lambda made, record: reported.append(record.divided_by))
    Arguments().__post_init__()
    assert reported == [2]
