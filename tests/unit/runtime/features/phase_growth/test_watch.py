"""GrownPhase is told from everything else that makes steps take longer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from grpo_run.runtime.features.phase_growth._watch import BLOCK_STEPS, GrownPhase, GrowthWatch

STEP = {
    "data": 0.002,
    "generate": 0.5,
    "score": 0.05,
    "reward": 0.02,
    "forward_backward": 0.3,
    "optimizer": 0.04,
}
Change = Callable[[int, float, dict[str, float]], float]
"""Changes the seconds of a block; takes its number, its position in the run from 0 to 1, and the seconds, and
returns how many times as long completions are as at the beginning.
"""


def run(
    change: Change, *, blocks: int = 400, seed: int = 1, noise: float = 0.03
) -> list[tuple[int, GrownPhase]]:
    """Return what is found in a run whose blocks are changed, with the step at which it is."""
    source, watch, found = random.Random(seed), GrowthWatch(), []
    for number in range(blocks):
        seconds = {name: value * max(0.1, source.gauss(1, noise)) for name, value in STEP.items()}
        length = change(number, number / blocks, seconds)
        growth = watch.add(seconds, (50_000 * length, 2e6 * length**2))
        if growth is not None:
            found.append(((number + 1) * BLOCK_STEPS, growth))
    return found


def scale(seconds: dict[str, float], factor: float, *phases: str) -> float:
    """Make phases slower; all if none is given. Completions are as long as at the beginning."""
    for phase in phases or STEP:
        seconds[phase] *= factor
    return 1.0


def grow(factor: float, *phases: str) -> Change:
    """Phases grow steadily, to as many times what they were."""
    return lambda number, position, seconds: scale(seconds, 1 + (factor - 1) * position, *phases)


# ---- growth ----


def test_hooks_that_a_script_adds_are_found() -> None:
    """Every forward pass gets slower, and each phase that has some is told once."""
    found = run(grow(4.0, "generate", "score", "forward_backward"))
    assert sorted(growth.phase for _, growth in found) == ["forward_backward", "generate", "score"]


def test_a_callback_that_scans_a_growing_list_is_found() -> None:
    """By the name of the callback."""

    def change(number: int, position: float, seconds: dict[str, float]) -> float:
        seconds["Scan.on_step_end"] = 0.02 * (1 + 7 * position)
        return 1.0

    ((step, growth),) = run(change)
    assert growth.phase == "Scan.on_step_end"
    assert growth.now >= 2 * growth.before
    assert step < 2500


RISES = {
    "steadily": (lambda step: 0.03 + 0.0003 * step, 4000),
    "with each hundred": (lambda step: 0.03 + 0.03 * (step // 100), 4000),
    "fast": (lambda step: 0.03 * 1.01**step, 520),
    "late": (lambda step: 0.03 + 0.0003 * max(0, step - 1000), 6000),
}
"""By name, what a reward takes at a step, and by which step it is told."""


@pytest.mark.parametrize("how", RISES)
@pytest.mark.parametrize("seed", range(2))
def test_a_reward_that_gets_slower_is_found_while_it_rises(how: str, seed: int) -> None:
    """From what to what."""
    seconds, latest = RISES[how]

    def change(number: int, position: float, phases: dict[str, float]) -> float:
        return scale(phases, seconds((number + 0.5) * BLOCK_STEPS) / STEP["reward"], "reward")

    ((_, growth),) = run(change, blocks=latest // BLOCK_STEPS, seed=seed, noise=0.05)
    assert growth.phase == "reward"
    assert growth.before == pytest.approx(0.034, rel=0.2)
    assert growth.now >= 2 * growth.before


@pytest.mark.parametrize(
    ("blocks", "begin"), [(100, 0.0), (300, 0.0), (300, 0.3), (3000, 0.0), (3000, 0.3), (3000, 0.6)]
)
def test_growth_is_found_in_short_and_long_runs(blocks: int, begin: float) -> None:
    """Also if it begins late."""

    def change(number: int, position: float, seconds: dict[str, float]) -> float:
        return scale(seconds, 1 + 6 * max(0.0, position - begin), "forward_backward")

    assert [growth.phase for _, growth in run(change, blocks=blocks)] == ["forward_backward"]


def test_a_reward_that_grows_faster_than_completions_is_found() -> None:
    """By how much more than they do."""

    def change(number: int, position: float, seconds: dict[str, float]) -> float:
        length = 1 + position
        scale(seconds, length, "generate", "score", "forward_backward")
        scale(seconds, length**2 * (1 + 8 * position), "reward")
        return length

    assert [growth.phase for _, growth in run(change)] == ["reward"]


# ---- healthy runs ----


def wandering(seed: int) -> Change:
    """Each phase has a level of its own that wanders: freely, about a level, or by jumps."""
    source = random.Random(seed)
    kind, size = seed % 3, source.choice((0.01, 0.03, 0.06))
    levels = dict.fromkeys(STEP, 0.0)

    def change(number: int, position: float, seconds: dict[str, float]) -> float:
        for phase, level in levels.items():
            move = source.gauss(0, size)
            if kind == 2:
                move *= 8 * (source.random() < 0.05)
            levels[phase] = level * (0.98 if kind == 1 else 1) + move
            seconds[phase] *= math.exp(levels[phase])
        return 1.0

    return change


@pytest.mark.parametrize("runs", [34, pytest.param(100, marks=pytest.mark.full)])
def test_at_most_one_of_a_hundred_wandering_runs_has_a_false_notice(runs: int) -> None:
    """The rule asks for so many parts that rise because of it."""
    false = [seed for seed in range(runs) if run(wandering(seed), blocks=(60, 300, 1000)[seed % 7 % 3])]
    assert len(false) <= 1, false


def _nothing(number: int, position: float, seconds: dict[str, float]) -> float:
    return 1.0


def _completions_grow_tenfold(number: int, position: float, seconds: dict[str, float]) -> float:
    length = 1 + 9 * position
    scale(seconds, length**1.3, "generate", "score", "forward_backward", "reward")
    return length


def _completions_shrink(number: int, position: float, seconds: dict[str, float]) -> float:
    scale(seconds, 1 - 0.8 * position, "generate")
    return 1 - 0.8 * position


def _another_job_starts(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 2.5 if position > 0.4 else 1.0)


def _another_job_takes_the_cores(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 2.5 if position > 0.5 else 1.0, "data", "reward", "score")


def _jobs_come_and_go(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, random.Random(number // 9).uniform(1, 2.5))


def _ever_more_jobs(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 1 + 4 * position)


def _warm_up(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 1 + 5 / (1 + number))


def _spikes(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 20.0 if number % 17 == 3 else 1.0)


def _rare_phase(number: int, position: float, seconds: dict[str, float]) -> float:
    if number % 7 == 0:
        seconds["Report.on_log"] = 0.5 * random.Random(number).uniform(0.5, 2)
    return 1.0


def _small_growth(number: int, position: float, seconds: dict[str, float]) -> float:
    seconds["Log.on_log"] = 1e-5 * (1 + 100 * position)
    return 1.0


def _saturating(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 1.8 - 0.8 * 0.5 ** (number / 5), "generate")


def _slower_by_half(number: int, position: float, seconds: dict[str, float]) -> float:
    return scale(seconds, 1 + 0.8 * position, "forward_backward")


HEALTHY = [
    _nothing, _completions_grow_tenfold, _completions_shrink, _another_job_starts,
    _another_job_takes_the_cores, _jobs_come_and_go, _ever_more_jobs, _warm_up, _spikes, _rare_phase,
    _small_growth, _saturating, _slower_by_half,
]  # fmt: skip


LONG = pytest.param(1000, 0.05, marks=pytest.mark.full)


@pytest.mark.parametrize("change", HEALTHY)
@pytest.mark.parametrize(("blocks", "noise"), [(60, 0.1), (300, 0.3), LONG])
def test_a_healthy_run_has_no_notice(change: Change, blocks: int, noise: float) -> None:
    """Whatever else makes its steps take longer."""
    assert run(change, blocks=blocks, noise=noise) == []


def test_a_phase_that_has_become_slower_is_told_once() -> None:
    """It is told while it rises."""

    def change(number: int, position: float, seconds: dict[str, float]) -> float:
        return scale(seconds, min(4.0, 1 + 0.02 * number), "forward_backward")

    assert len(run(change, blocks=1000)) == 1
