"""A run that has started over leaves the directories of the run before it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.rank.resuming.request import output_directory, script_argument


def config(starts_over: int) -> RunConfig:
    """Of the second run of a command, or of an ordinary run."""
    return RunConfig(
        run_id="train-1a-2", run_directory=Path("runs/train-1a-2"), target="train.py", module=False,
        arguments=(),
        command=("train.py",), starts_over=starts_over,
    )  # fmt: skip


def test_an_ordinary_run_writes_where_the_script_says() -> None:
    assert output_directory(config(0), "out/") == "out/"
    assert script_argument(config(0), "out", True) is True


@pytest.mark.parametrize("chosen", ["out", "out/", "/data/out"])
def test_a_run_that_has_started_over_writes_beside_it(chosen: str) -> None:
    """The same directory for every call with the same settings, which keep it."""
    beside = output_directory(config(1), chosen)
    assert Path(beside).parent == Path(chosen).parent
    assert Path(beside).name == "out.train-1a-2"
    assert output_directory(config(1), beside) == beside


@pytest.mark.parametrize("chosen", ["out", "out.train-1a-2"])
def test_checkpoints_of_the_run_before_are_not_resumed_from(chosen: str) -> None:
    """Nor searched for; a checkpoint from elsewhere, with which the first run began too, is."""
    assert script_argument(config(1), chosen, True) is None
    assert script_argument(config(1), chosen, "out/checkpoint-4") is None
    assert script_argument(config(1), chosen, "base/checkpoint-4") == "base/checkpoint-4"
    assert script_argument(config(1), chosen, None) is None
