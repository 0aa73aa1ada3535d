"""Which sizes DeepSpeed's configuration fixes, and which follow those of a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.memory.deepspeed import ACCUMULATION, FILE, USED, explicit_sizes, follow_sizes


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USED, FILE, ACCUMULATION):
        monkeypatch.setenv(name, "")  # restored after the test, also what is set in it
        monkeypatch.delenv(name)


class Settings:
    """Stands for accelerate's `HfDeepSpeedConfig`."""

    def __init__(self, **config: Any) -> None:
        self.config = config


def arguments(**config: Any) -> Any:
    return SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=6,
        deepspeed_plugin=SimpleNamespace(hf_ds_config=Settings(**config)),
    )


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
