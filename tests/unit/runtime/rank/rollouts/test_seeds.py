"""Each sample of a run has a seed of its own, by the script's seed and its place alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.rank.rollouts import seeds
from grpo_run.runtime.rank.rollouts.seeds import seed_of, takes_seed


@pytest.fixture(autouse=True)
def undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "record_of", lambda args: SimpleNamespace(divided_by=args.divided_by))


def trainer(seed: int = 7, micro_step: int = 0, divided_by: int = 1) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(seed=seed, divided_by=divided_by), _step=micro_step, num_generations=4
    )


def test_no_two_samples_of_a_run_share_a_seed() -> None:
    """Whatever rank they are on: 20 rollouts of 64 samples."""
    found = {seed_of(trainer(micro_step=step), sample) for step in range(20) for sample in range(64)}
    assert len(found) == 20 * 64
    assert all(0 <= one < 1 << 32 for one in found)


def test_a_repeated_rollout_has_the_same_seeds() -> None:
    """Also in micro-batches of half the size, of which it needs twice as many. Another seed changes all."""
    first = [seed_of(trainer(micro_step=6), sample) for sample in range(8)]
    assert [seed_of(trainer(micro_step=12, divided_by=2), sample) for sample in range(8)] == first
    assert not set(first) & {seed_of(trainer(8, 6), sample) for sample in range(8)}


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda self, seed=None, **row: None, True),
        (lambda self, *, seed=None: None, True),
        (lambda self, seed=0, **row: None, False),
        (lambda self, seed: None, False),
        (lambda self, **row: None, False),
        (dict, False),
    ],
)
def test_a_function_is_given_a_seed_if_it_has_none(function: Any, takes: bool) -> None:
    """A seed that the script chooses is left alone."""
    assert takes_seed(function) is takes
