"""Offload of the optimizer in each way in which DeepSpeed is configured."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_run.runtime.rank.memory_plan.deepspeed import (
    ACCUMULATION,
    DEVICE,
    FILE,
    USED,
    explicit_sizes,
    keep_optimizer,
    offload_optimizer,
)

ZERO = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
OFFLOAD = {"device": "cpu", "pin_memory": True}


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USED, FILE, DEVICE, ACCUMULATION):
        monkeypatch.setenv(name, "")  # restored after the test, also what is set in it
        monkeypatch.delenv(name)


def test_without_deepspeed_nothing_is_changed() -> None:
    assert offload_optimizer(SimpleNamespace(deepspeed=None)) == {}
    assert DEVICE not in os.environ


def test_a_configuration_of_the_script_is_replaced_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(ZERO))
    for given in (ZERO, str(path)):
        changed = offload_optimizer(SimpleNamespace(deepspeed=given))
        assert changed["deepspeed"]["zero_optimization"] == {"stage": 3, "offload_optimizer": OFFLOAD}
        assert changed["deepspeed"]["train_batch_size"] == "auto"
    assert "offload_optimizer" not in ZERO["zero_optimization"]


def test_without_zero_there_is_nothing_to_offload() -> None:
    assert offload_optimizer(SimpleNamespace(deepspeed={"train_batch_size": "auto"})) == {}


def test_accelerates_variables_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USED, "true")
    assert offload_optimizer(SimpleNamespace(deepspeed=None)) == {}
    assert os.environ[DEVICE] == "cpu"


def test_accelerates_file_is_replaced_by_its_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(ZERO))
    monkeypatch.setenv(USED, "true")
    monkeypatch.setenv(FILE, str(path))
    offload_optimizer(SimpleNamespace(deepspeed=None))
    text = json.loads(base64.urlsafe_b64decode(os.environ[FILE]))
    assert text["zero_optimization"]["offload_optimizer"] == OFFLOAD
    # a second configuration of the same process finds the text
    offload_optimizer(SimpleNamespace(deepspeed=None))
    assert json.loads(base64.urlsafe_b64decode(os.environ[FILE])) == text


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
    """accelerate replaces it by DeepSpeed's own if this is not set, and that one cannot load the run's state."""
    own, built = {**ZERO}, {**ZERO, "optimizer": {"type": "AdamW"}}
    for one in (own, built):
        keep_optimizer(SimpleNamespace(deepspeed_config=one))
    assert own["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in built
