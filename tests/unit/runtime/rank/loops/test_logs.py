"""What a script logs of the steps of its loop is published like what a Trainer logs."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from grpo_run.runtime.rank.loops.run import log_values
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.trainers import loop
from grpo_run.watchdog.observation import Slot

Log = Callable[[Mapping[str, Any]], None]
Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def points() -> CallPoints:
    """Those of the run's second call."""
    return CallPoints(train_call=2, trainer=None, hooks=ExitStack())


@pytest.fixture
def log(session: Any, points: CallPoints) -> Log:
    """Log values of the run's second call, whose fourth step is in progress."""
    return functools.partial(log_values, session, points, 4)


@pytest.mark.parametrize(
    "value",
    [0.5, np.float32(0.5), np.array([0.5]), torch.tensor(0.5, requires_grad=True), torch.tensor([0.5])],
)
@pytest.mark.parametrize("name", ["loss", "train/loss"])
def test_a_number_of_any_kind_is_published(
    name: str, value: Any, log: Log, reading: Callable[[], Slot], events: Events
) -> None:
    """On the board, and in the journal as of the step in progress; what is no number is left out."""
    log({name: value, "reward": 2, "lr": 1e-3, "histogram": torch.ones(3), "text": "high", 3: 4})  # type: ignore[dict-item]
    slot = reading()
    assert [slot.value(name) for name in ("loss", "reward", "learning_rate")] == [0.5, 2.0, 1e-3]
    (record,) = [record for record in events() if record["event"] == "step_logged"]
    assert (record["step"], record["train_call"], record["loss"], record["reward"]) == (4, 2, 0.5, 2.0)


@pytest.mark.parametrize("value", ["high", True, None, torch.ones(3), object()])
def test_what_is_no_number_is_ignored(value: Any, log: Log, reading: Callable[[], Slot]) -> None:
    """A logger may take it."""
    log({"reward": value})
    assert math.isnan(reading().value("reward"))


def test_features_hear_what_was_logged(log: Log, points: CallPoints) -> None:
    """The numbers that are known, by their fields."""
    heard: list[Any] = []
    points.logged.append(heard.append)
    log({"train/loss": torch.tensor(0.5), "histogram": torch.ones(3), "lr": 1e-3})
    assert heard == [{"loss": 0.5, "learning_rate": 1e-3}]


def test_another_thread_writes_nothing(log: Log, reading: Callable[[], Slot]) -> None:
    """The slot has one writer."""
    thread = threading.Thread(target=log, args=({"reward": 1.0},))
    thread.start()
    thread.join()
    assert math.isnan(reading().value("reward"))


def test_outside_the_launcher_nothing_happens() -> None:
    """The same script runs under torchrun."""
    loop.log({"loss": 0.5})
