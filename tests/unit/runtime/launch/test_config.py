"""The configuration of a run."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.config import RunConfig, Timeouts
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def make_config(**changes: Any) -> RunConfig:
    """A run of train.py."""
    fields: dict[str, Any] = {
        "run_id": "train-abc123", "run_directory": Path("runs/train-abc123"), "target": "train.py",
        "module": False, "arguments": ("--lr", "1e-6"), "command": ("train.py", "--lr", "1e-6"),
        "environment": {"HF_TOKEN": "hf_secret"},
    }  # fmt: skip
    return RunConfig(**(fields | changes))


@pytest.mark.parametrize(
    ("name", "shown"), [("vote_seconds", "--vote-timeout"), ("stop_seconds", "--stop-timeout")]
)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_timeout_of_0_or_less_is_refused(name: str, shown: str, value: float) -> None:
    """The message names the flag that sets it."""
    with pytest.raises(ConfigError, match=shown):
        Timeouts(**{name: value})


def test_a_negative_cleanup_interval_is_refused() -> None:
    """0 means never."""
    with pytest.raises(ConfigError, match="--cleanup-every"):
        make_config(cleanup_every=-1)


def test_every_field_but_the_environment_is_recorded_as_json() -> None:
    """With the values of the command line; a field that is added is recorded without another change. The
    environment may hold secrets.
    """
    config = make_config(features={"one": {"seconds": 2.5}})
    text = json.dumps(config.as_json())
    record = json.loads(text)
    assert set(record) == {field.name for field in fields(config)} - {"environment"}
    assert "hf_secret" not in text
    assert (record["run_id"], record["arguments"]) == ("train-abc123", ["--lr", "1e-6"])
    assert record["features"] == {"one": {"seconds": 2.5}}


def test_a_ceiling_that_acts_before_the_vote_timeout_is_refused() -> None:
    """A vote that times out reports which ranks did not come; the hang detector must not kill them before."""
    with pytest.raises(ConfigError, match=r"--deadline-ceiling 20: must be above --vote-timeout \(20 s\)"):
        make_config(
            timeouts=Timeouts(vote_seconds=20.0),
            deadlines=DeadlineSettings(floor_seconds=5, ceiling_seconds=20.0, first_floor_seconds=5),
        )
