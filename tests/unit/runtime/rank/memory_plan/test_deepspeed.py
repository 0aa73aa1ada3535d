"""What a plan changes in DeepSpeed's configuration, and which sizes that fixes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.rank.memory_plan.deepspeed import (
    ACCUMULATION,
    FILE,
    USED,
    explicit_sizes,
    follow_sizes,
    keep_optimizer,
    offload_optimizer,
)

ZERO = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
OFFLOAD = {"device": "cpu", "pin_memory": True}


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USED, FILE, ACCUMULATION):
        monkeypatch.setenv(name, "")  # restored after the test, also what is set in it
        monkeypatch.delenv(name)


class Settings:
    """Stands for accelerate's `HfDeepSpeedConfig`."""

    def __init__(self, **config: Any) -> None:
        self.config, self.read = config, 0

    def set_stage_and_offload(self) -> None:
        self.read += 1


def arguments(**config: Any) -> Any:
    return SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=6,
        deepspeed_plugin=SimpleNamespace(hf_ds_config=Settings(**config), offload_optimizer_device=None),
    )


def test_the_optimizer_is_offloaded_where_deepspeed_has_zero() -> None:
    made = arguments(zero_optimization={"stage": 3, "offload_optimizer": {"device": "none"}})
    offload_optimizer(made)
    settings = made.deepspeed_plugin.hf_ds_config
    assert settings.config["zero_optimization"] == {"stage": 3, "offload_optimizer": OFFLOAD}
    assert (made.deepspeed_plugin.offload_optimizer_device, settings.read) == ("cpu", 1)
    without = arguments(train_batch_size="auto")
    offload_optimizer(without)
    assert without.deepspeed_plugin.hf_ds_config.config == {"train_batch_size": "auto"}
    offload_optimizer(SimpleNamespace(deepspeed_plugin=None))


def test_sizes_that_transformers_has_filled_in_follow_the_plan() -> None:
    made = arguments(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=3, train_batch_size=24)
    follow_sizes(made)
    config = made.deepspeed_plugin.hf_ds_config.config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 6)
    assert config["train_batch_size"] == 24
    later = arguments(train_micro_batch_size_per_gpu="auto")
    follow_sizes(later)
    assert later.deepspeed_plugin.hf_ds_config.config == {"train_micro_batch_size_per_gpu": "auto"}


def test_the_accumulation_of_accelerate_is_explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USED, "true")
    monkeypatch.setenv(ACCUMULATION, "2")
    (name,) = explicit_sizes(SimpleNamespace(deepspeed=None))
    assert "accelerate" in name


def test_a_file_that_is_not_json_fixes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text("{")
    assert [*explicit_sizes(SimpleNamespace(deepspeed=str(path)))] == []
    assert [*explicit_sizes(SimpleNamespace(deepspeed="not base64"))] == []


def test_the_optimizer_of_the_run_stays_unless_deepspeed_builds_it() -> None:
    """accelerate replaces it by DeepSpeed's own if this is not set, and that one cannot load the run's
    state.
    """
    own, built = {**ZERO}, {**ZERO, "optimizer": {"type": "AdamW"}}
    for one in (own, built):
        keep_optimizer(SimpleNamespace(deepspeed_config=one))
    assert own["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in built
