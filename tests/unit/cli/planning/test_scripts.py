"""`grpo-run plan SCRIPT`: a script runs until its first `train()`, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_run.cli import plan
from grpo_run.cli.main import main
from grpo_run.cli.planning import script
from grpo_run.cli.planning._script_process import ScriptReply
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.planning.computation import Computation

CONFIGURATION = {"model_type": "qwen2", "_name_or_path": "some/model"}


KNOWN = Computation(
    configuration=CONFIGURATION, weights="bfloat16", attention="sdpa", optimizer="adamw_torch"
)  # fmt: skip


def _reply(monkeypatch: pytest.MonkeyPatch, reply: dict[str, Any], **facts: Any) -> None:
    values: dict[str, Any] = {
        "trainer_class": "GRPOTrainer",
        "trainer": "grpo",
        "world_size": 1,
        "layout": "ddp",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    } | facts
    found = ScriptReply(**{"facts": MemoryFacts(**values), "computation": KNOWN, **reply})
    monkeypatch.setattr(script, "_run", lambda *_: found)


def test_a_job_has_what_the_live_trainer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings, and the type and kernels of its model."""
    _reply(monkeypatch, {"settings": {"beta": 0.5, "dtype": None}})
    source = script.read_script("train.py")
    assert source.settings["beta"] == 0.5
    assert (source.settings["dtype"], source.settings["optim"]) == ("bfloat16", "adamw_torch")
    assert (source.algorithm, source.settings["model"]) == ("grpo", "some/model")
    assert source.configuration == CONFIGURATION


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        ("", [], "grpo"),
        ("max_length: 300\n", [], "sft"),
        ("max_length: 300\n", ["--algorithm", "rloo"], "rloo"),
    ],
)
def test_a_file_of_trl_is_planned_by_its_script(
    content: str, words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of GRPO, unless the file has keys of SFT only or an option names another."""
    file = tmp_path / "job.yaml"
    file.write_text(f"model_name_or_path: some/model\n{content}")
    asked: list[tuple[Any, ...]] = []

    def read(*given: Any) -> None:
        asked.append(given)
        raise ConfigError("asked")

    monkeypatch.setattr(plan, "read_script", read)
    assert main(["plan", str(file), "--ranks", "2", *words]) == 2
    assert asked == [(f"trl.scripts.{expected}", ["--config", str(file)], 2)]


def test_what_is_not_followed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is printed, with a note."""
    _reply(monkeypatch, {"own_optimizer": True, "reward_models": True}, generates="script")
    notes = script.read_script("train.py").notes
    assert any("own optimizer" in note for note in notes)
    assert any("rollout function" in note for note in notes)
    assert any("reward model" in note for note in notes)
