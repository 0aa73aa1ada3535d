"""What the constructor of an injection refuses."""

from __future__ import annotations

import math

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injections import Injection


@pytest.mark.parametrize(("rank", "step"), [(-1, 1), (0, 0), (0, -3)])
def test_the_constructor_checks_rank_and_step(rank: int, step: int) -> None:
    """Tests construct injections without text."""
    with pytest.raises(ConfigError):
        Injection.of("kill", rank=rank, step=step)


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0, 1e9])
def test_the_constructor_checks_the_duration(seconds: float) -> None:
    """NaN above all, which compares as false."""
    with pytest.raises(ConfigError, match="seconds"):
        Injection.of("slow", rank=0, step=1, seconds=seconds)
