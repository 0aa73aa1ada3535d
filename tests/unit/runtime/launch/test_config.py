"""A run's configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.config import RunConfig, Timeouts


def make_config(**changes: Any) -> RunConfig:
    """A run of train.py."""
    fields: dict[str, Any] = {
        "run_id": "train-abc123", "run_directory": Path("runs/train-abc123"), "target": "train.py",
        "module": False, "arguments": ("--lr", "1e-6"), "command": ("train.py", "--lr", "1e-6"),
        "environment": {"HF_TOKEN": "hf_secret"},
    }  # fmt: skip
    return RunConfig(**(fields | changes))


@pytest.mark.parametrize("name", ["vote_seconds", "stop_seconds", "term_seconds"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_deadline_must_lie_ahead(name: str, value: float) -> None:
    """The wrong one is named."""
    with pytest.raises(ConfigError, match=name):
        Timeouts(**{name: value})


def test_a_negative_hygiene_interval_is_refused() -> None:
    """0 means never; less means nothing."""
    with pytest.raises(ConfigError, match="--hygiene-every"):
        make_config(hygiene_every=-1)


def test_what_is_recorded_holds_no_environment() -> None:
    """It may hold secrets."""
    assert "hf_secret" not in json.dumps(make_config().as_json())


def test_what_is_recorded_says_what_was_asked_for() -> None:
    """As JSON."""
    record = json.loads(json.dumps(make_config(generation={"max_time": 2.5}).as_json()))
    assert record["run_id"] == "train-abc123"
    assert record["arguments"] == ["--lr", "1e-6"]
    assert record["generation"] == {"max_time": 2.5}
