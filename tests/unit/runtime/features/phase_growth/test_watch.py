"""Growth is told from everything else that makes steps take longer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from grpo_run.runtime.features.phase_growth._watch import LATER, SOON, Block, GrowthWatch, View
from grpo_run.runtime.features.phase_growth.events import GrowthFound

STEP = {
    "data": 0.002,
    "generate": 0.5,
    "score": 0.05,
    "reward": 0.02,
    "forward_backward": 0.3,
    "optimizer": 0.04,
}
COUNTS = {"hooks": 1, "threads": 12, "descriptors": 60, "objects": 2e6, "collection": 0.001, "log": 0}
BLOCK_STEPS = LATER.block_steps

Change = Callable[[int, float, dict[str, Any]], None]
"""Changes the fields of a block; takes its number, its position in the run from 0 to 1, and the fields."""


def run(
    change: Change, *, blocks: int = 100, seed: int = 1, noise: float = 0.03, view: View = LATER
) -> list[GrowthFound]:
    """Return what is found in a run whose blocks are changed."""
    source = random.Random(seed)
    watch, found = GrowthWatch(0, blocks * view.block_steps, view, set()), []
    for number in range(blocks):
        fields: dict[str, Any] = {
            "last_step": (number + 1) * view.block_steps,
            "seconds": {name: value * source.gauss(1, noise) for name, value in STEP.items()},
            "shares": dict.fromkeys(STEP, 1.0),
            "work": [6400.0, 50_000.0, 2e6, 50_000.0, 4e5, 800.0],
            "functions": {"length": 0.008, "accuracy": 0.012},
            "counts": COUNTS | {"log": 10.0 * number},
        }
        change(number, number / blocks, fields)
        growth = watch.add(Block(**fields))
        if growth is not None:
            found.append(msgspec.structs.replace(growth, step=fields["last_step"]))
    return found


def grow(phase: str, factor: float, **counts: float) -> Change:
    """A phase and counts grow steadily, to as many times what they were."""

    def change(number: int, position: float, fields: dict[str, Any]) -> None:
        fields["seconds"][phase] = fields["seconds"].get(phase, 0.02) * (1 + (factor - 1) * position)
        fields["shares"].setdefault(phase, 1.0)
        for name, most in counts.items():
            fields["counts"][name] = COUNTS[name] + (most - COUNTS[name]) * position

    return change


def all_of(*changes: Change) -> Change:
    """Several changes."""

    def change(number: int, position: float, fields: dict[str, Any]) -> None:
        for one in changes:
            one(number, position, fields)

    return change


def scale(fields: dict[str, Any], factor: float, *phases: str) -> None:
    """Make phases slower; all if none is given."""
    for phase in phases or STEP:
        fields["seconds"][phase] *= factor


# ---- growth ----


def test_hooks_that_a_script_adds_are_named() -> None:
    """Every forward pass gets slower; the phase that costs most is told first."""

    def module(number: int, position: float, fields: dict[str, Any]) -> None:
        fields["most_hooks"] = "model.embed_tokens"

    slower = (grow(phase, 2.5, hooks=5000) for phase in ("generate", "score", "forward_backward"))
    found = run(all_of(*slower, module))
    assert [growth.phase for growth in found] == ["generate", "forward_backward", "score"]
    first = found[0]
    assert 1.3 <= first.factor < 1.5
    assert " as up to step 1000," in first.sentence
    assert first.since_step <= 2500
    assert first.lost_seconds is not None
    # the excess grows by 0.5 s * 1.5 within 10,000 steps
    assert first.lost_seconds == pytest.approx(0.5 * 1.5 * 10_000 / 2, rel=0.35)
    assert first.grew[0].startswith("hooks of the model, from ")
    assert first.grew[0].endswith("(most in model.embed_tokens)")
    assert first.sentence.startswith("steps get slower: phase generate takes 1.")


def test_a_callback_that_scans_a_growing_list_is_named() -> None:
    """The log history, which always grows, is told only of callbacks."""
    (growth,) = run(grow("Scan.on_step_end", 8.0))
    assert growth.phase == "Scan.on_step_end"
    assert "callback Scan.on_step_end takes" in growth.sentence
    assert any(text.startswith("log history, from ") for text in growth.grew)


def test_a_reward_function_that_gets_slower_is_named() -> None:
    """The one of several whose own time has grown."""

    def function(number: int, position: float, fields: dict[str, Any]) -> None:
        fields["functions"]["accuracy"] *= 1 + 5 * position

    (growth,) = run(all_of(grow("reward", 4.0), function))
    assert (growth.phase, growth.grew) == ("reward", ("reward function accuracy",))


def test_threads_that_slow_all_phases_are_named() -> None:
    """The machine would make all phases slower too, but it starts no threads in this process."""
    changes = (grow(phase, 2.0, threads=400) for phase in STEP)
    found = run(all_of(*changes))
    assert {growth.phase for growth in found} == {"generate", "score", "forward_backward", "optimizer"}
    assert all(growth.grew[0].startswith("threads, from ") for growth in found)


def test_a_cache_that_is_searched_is_seen_by_its_objects() -> None:
    """A cache of tensors in the model's forward pass, as an example."""
    found = run(grow("forward_backward", 2.0, objects=9e6))
    assert found[0].phase == "forward_backward"
    assert found[0].grew[0].startswith("memory blocks of Python objects, from ")


def test_a_data_set_that_gets_slower_is_seen() -> None:
    """Nothing that is counted grows with it."""
    found = run(grow("data", 40.0))
    assert [growth.phase for growth in found] == ["data"]
    assert found[0].sentence.endswith("Cannot tell what grew with it")


@pytest.mark.parametrize(
    ("blocks", "begin"), [(30, 0.0), (30, 0.3), (300, 0.0), (300, 0.3), (300, 0.6), (1000, 0.6)]
)
def test_growth_is_found_in_short_and_long_runs(blocks: int, begin: float) -> None:
    """Also if it begins late."""

    def change(number: int, position: float, fields: dict[str, Any]) -> None:
        scale(fields, 1 + 4 * max(0.0, position - begin), "forward_backward")

    (growth,) = run(change, blocks=blocks)
    assert growth.phase == "forward_backward"
    assert growth.since_step == pytest.approx(
        (begin + 0.06) * blocks * BLOCK_STEPS, abs=0.12 * blocks * BLOCK_STEPS
    )


def test_a_run_without_an_end_has_no_sum() -> None:
    """The loop does not know how many steps it takes."""
    watch = GrowthWatch(0, 0, LATER, set())
    for number in range(40):
        seconds = {"data": 0.01, "forward_backward": 1 + 0.05 * number}
        growth = watch.add(
            Block(
                last_step=number,
                seconds=seconds,
                shares=dict.fromkeys(seconds, 1.0),
                work=(),
                functions={},
                counts=COUNTS,
            )
        )
        if growth is not None:
            assert growth.lost_seconds is None
            assert "at this rate" not in growth.sentence
            return
    pytest.fail("no growth was found")


# ---- what doubles is told while it does ----


def reward(seconds: Callable[[float], float], tokens: Callable[[float], float] = lambda step: 1) -> Change:
    """A reward takes so long at a step, on completions of so many times their length at the beginning."""

    def change(number: int, position: float, fields: dict[str, Any]) -> None:
        step = (number + 0.5) * SOON.block_steps
        fields["seconds"]["reward"] *= seconds(step) / STEP["reward"]
        fields["functions"]["accuracy"] = seconds(step)
        length = tokens(step)
        scale(fields, length, "generate", "score", "forward_backward")
        fields["work"] = [6400 * length, 50_000 * length, 2e6 * length**2, 50_000 * length, 4e5, 800.0]

    return change


RISES = {
    "steadily": (lambda step: 0.03 + 0.0003 * step, 250),
    "with each hundred": (lambda step: 0.03 + 0.03 * (step // 100), 350),
    "fast": (lambda step: 0.03 * 1.01**step, 170),
    "late": (lambda step: 0.03 + 0.0003 * max(0, step - 1000), 1300),
}
"""By name, what a reward takes at a step, and by which step it is told. All but "fast" are at 2 times their
beginning after 100 steps, and at 5 % of a step after 150."""


@pytest.mark.parametrize("how", RISES)
@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_has_doubled_is_named_while_it_rises(how: str, seed: int) -> None:
    """With the function, from what to what, and since when."""
    seconds, latest = RISES[how]
    growth = run(reward(seconds), blocks=latest // 10, seed=seed, noise=0.05, view=SOON)[0]
    assert growth.phase == "reward"
    assert 2 <= growth.factor < 4
    assert growth.grew == ("reward function accuracy",)
    assert " s in place of 0.0" in growth.sentence


SILENT = {
    "it stays as fast": reward(lambda step: 0.03),
    "it is a small part of a step": reward(lambda step: 0.003 + 0.00003 * step),
    "it has not doubled": reward(lambda step: 0.1 + 0.08 * min(1, step / 500)),
    "some steps are slow": reward(lambda step: 2.0 if step % 70 < 10 else 0.03),
    "it comes to another level": reward(lambda step: 0.03 if step < 300 else 0.15),
    "completions get longer": reward(lambda step: 0.03 + 0.0003 * step, lambda step: 1 + 0.01 * step),
}


@pytest.mark.parametrize("why", SILENT)
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_told_soon_if(why: str, seed: int) -> None:
    """Noise of a tenth, as on a busy machine."""
    assert run(SILENT[why], blocks=60, seed=seed, noise=0.1, view=SOON) == []


def test_a_reward_that_grows_faster_than_completions_is_told() -> None:
    """By how much more than they do."""
    growths = run(
        reward(lambda step: 0.03 + 0.0009 * step, lambda step: 1 + 0.001 * step), blocks=60, view=SOON
    )
    assert [growth.phase for growth in growths] == ["reward"]


# ---- healthy runs ----


def _nothing(number: int, position: float, fields: dict[str, Any]) -> None:
    pass


def _completions_grow_tenfold(number: int, position: float, fields: dict[str, Any]) -> None:
    factor = 1 + 9 * position
    scale(fields, factor**1.3, "generate", "score", "forward_backward", "reward")
    fields["work"] = [
        6400 * factor,
        50_000 * factor,
        2e6 * factor**2,
        50_000 * factor,
        4e5 * factor**2,
        800.0,
    ]


def _completions_shrink(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, 1 - 0.8 * position, "generate")


def _another_job_starts(number: int, position: float, fields: dict[str, Any]) -> None:
    if position > 0.4:
        scale(fields, 1.8)


def _another_job_takes_the_cores(number: int, position: float, fields: dict[str, Any]) -> None:
    if position > 0.5:
        scale(fields, 2.5, "data", "reward", "score")


def _jobs_come_and_go(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, random.Random(number // 9).uniform(1, 2.5))


def _ever_more_jobs(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, 1 + 2 * position)


def _ever_more_jobs_without_a_collector(number: int, position: float, fields: dict[str, Any]) -> None:
    fields["counts"] = fields["counts"] | {"collection": 0.0}
    scale(fields, 1 + 2 * position)


def _evaluations(number: int, position: float, fields: dict[str, Any]) -> None:
    if number % 5 == 0:
        scale(fields, 1.4, "generate")


def _warm_up(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, 1 + 5 / (1 + number))


def _cool_start(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, 0.7 if number < 12 else 1.0)


def _spikes(number: int, position: float, fields: dict[str, Any]) -> None:
    if number % 17 == 3:
        scale(fields, 20.0)


def _rare_phase(number: int, position: float, fields: dict[str, Any]) -> None:
    if number % 7 == 0:
        fields["seconds"]["Report.on_log"] = 0.5 * random.Random(number).uniform(0.5, 2)
        fields["shares"]["Report.on_log"] = 0.01


def _small_growth(number: int, position: float, fields: dict[str, Any]) -> None:
    fields["seconds"]["Log.on_log"] = 1e-5 * (1 + 100 * position)
    fields["shares"]["Log.on_log"] = 1.0


def _slower_once(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, min(1.6, 1 + 2 * position), "forward_backward")


def _saturating(number: int, position: float, fields: dict[str, Any]) -> None:
    scale(fields, 1.25 - 0.25 * 0.5 ** (number / 5), "generate")


def _more_counts(number: int, position: float, fields: dict[str, Any]) -> None:
    fields["counts"] = {
        name: value * (1 + 10 * position) + number for name, value in fields["counts"].items()
    }


def _fewer_samples_later(number: int, position: float, fields: dict[str, Any]) -> None:
    if position > 0.5:
        fields["work"] = [0.5 * kind for kind in fields["work"]]


HEALTHY = [
    _nothing, _completions_grow_tenfold, _completions_shrink, _another_job_starts,
    _another_job_takes_the_cores, _jobs_come_and_go, _ever_more_jobs,
    _ever_more_jobs_without_a_collector, _evaluations, _warm_up, _cool_start,
    _spikes, _rare_phase, _small_growth, _saturating, _more_counts, _fewer_samples_later,
]  # fmt: skip


@pytest.mark.parametrize("change", HEALTHY)
@pytest.mark.parametrize(
    ("blocks", "noise", "view"),
    [(40, 0.03, LATER), (100, 0.15, LATER), (1000, 0.05, LATER), (60, 0.1, SOON), (300, 0.3, SOON)],
)
def test_a_healthy_run_raises_no_alarm(change: Change, blocks: int, noise: float, view: View) -> None:
    """Whatever else makes its steps take longer."""
    assert run(change, blocks=blocks, noise=noise, view=view) == []


def test_a_phase_that_has_become_slower_is_not_told_once_it_stays_so() -> None:
    """It is told while it rises, once."""
    assert len(run(_slower_once)) == 1
    assert len(run(_slower_once, blocks=1000)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_raises_no_alarm(seed: int) -> None:
    """Blocks of a busy machine, after a step to another level."""

    def change(number: int, position: float, fields: dict[str, Any]) -> None:
        if position > 0.2:
            scale(fields, 1.6, "forward_backward", "data")

    assert run(change, blocks=400, seed=seed, noise=0.1) == []
