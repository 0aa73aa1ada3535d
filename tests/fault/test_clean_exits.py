"""Healthy runs report no recoveries and no warnings on a busy machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator

import pytest
from support.runs import SCRIPTS, Run


def _burn(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(10_000))


@pytest.fixture
def cpu_load() -> Iterator[None]:
    """Run one busy process per core for the duration of the test."""
    context = multiprocessing.get_context("spawn")
    burners = [
        context.Process(target=_burn, args=(os.getpid(),), daemon=True) for _ in range(os.cpu_count() or 2)
    ]
    for burner in burners:
        burner.start()
    yield
    for burner in burners:
        burner.kill()
        burner.join(10)


@pytest.mark.alone
@pytest.mark.parametrize("count", [3, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_clean_exits_under_load(count: int, runs: Callable[..., Run], cpu_load: None) -> None:
    """Every run on Gloo exits with 0, without recoveries or warnings."""
    outcomes = []
    for number in range(count):
        run = runs(
            "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", f"out{number}",
            "--max-steps", "4", "--save-steps", "2", name=f"run{number}",
        ).start()  # fmt: skip
        code = run.wait(180)
        status = run.status()
        outcomes.append((code, len(status["recoveries"]), status["warnings"], status["state"]))
    assert outcomes == [(0, 0, 0, "finished")] * count
