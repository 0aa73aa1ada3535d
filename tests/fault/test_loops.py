"""A hand-written loop that is killed ends as the undisturbed one: weights, and every number of every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loops import differences, kills, launched, undisturbed
from support.runs import Run

CELLS = [
    pytest.param(form, mode, ranks, workers, id=f"{form}-{mode}-{ranks}{'-workers' if workers else ''}")
    for form, mode, ranks, workers in (
        ("for", "none", 1, ()),
        ("for", "ddp", 2, ()),
        ("for", "ddp", 3, ()),
        ("for", "none", 2, ()),
        ("data", "none", 1, ()),
        ("data", "none", 1, ("--workers", "1")),
        ("data", "none", 1, ("--workers", "1", "--keep-workers")),
        ("data", "ddp", 2, ()),
        ("data", "ddp", 3, ()),
        ("while", "none", 1, ()),
        ("while", "ddp", 2, ()),
        ("for", "fsdp2", 2, ()),
        ("data", "fsdp2", 2, ()),
    )
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("form", "mode", "ranks", "workers"), CELLS)
def test_a_loop_killed_at_every_step_equals_the_undisturbed_one(
    form: str, mode: str, ranks: int, workers: tuple[str, ...], tmp_path: Path, runs: Callable[..., Run]
) -> None:
    """Two epochs and a part of the third: 14 steps of one rank, 6 to 8 of several."""
    steps = 14 if ranks == 1 else 8
    words = ("--form", form, "--mode", mode, "--steps", str(steps), *workers)
    expected = undisturbed(tmp_path, *words, ranks=ranks)
    killed = kills(range(1, steps + 1), ranks)
    run = launched(runs, tmp_path, *words, ranks=ranks, options=killed).start()
    assert run.wait(400) == 0, run.tail()
    assert len(run.events("fault_injected")) == steps, run.tail()
    different = differences(tmp_path / "out", expected)
    assert not different, "\n".join([*different, run.tail()])


def test_a_loop_over_data_killed_in_two_epochs_equals_the_undisturbed_one(
    tmp_path: Path, runs: Callable[..., Run]
) -> None:
    """The global generator draws the order, the samples and the dropout."""
    words = ("--form", "data", "--steps", "9")
    expected = undisturbed(tmp_path, *words)
    run = launched(runs, tmp_path, *words, options=kills((4, 8), 1)).start()
    assert run.wait(60) == 0, run.tail()
    assert not (different := differences(tmp_path / "out", expected)), "\n".join([*different, run.tail()])
