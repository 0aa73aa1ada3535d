"""What every step may keep, and when it reaches what was observed. Nothing is traced."""

from __future__ import annotations

from support.predictions import GIB

from grpo_run.runtime.planning.explaining import GrowthPerStep, Kept

KEPT = [
    Kept(name="small", what="a small thing", step_bytes=0.1 * GIB),
    Kept(name="middle", what="a thing of one GiB", step_bytes=1.0 * GIB),
    Kept(name="large", what="a large thing", step_bytes=30.0 * GIB),
]
GROWTH = GrowthPerStep(start_bytes=2.0 * GIB, steps=(12, 24), kept=KEPT)


def test_what_reaches_the_size_in_one_of_the_steps_fits_and_comes_first() -> None:
    """From 2 to 20 GiB in 12 to 24 steps: 18 steps of one GiB."""
    assert GROWTH.a_step(20 * GIB) == (0.75 * GIB, 1.5 * GIB)
    assert GROWTH.ranked(20 * GIB)[0].name == "middle"
    assert [one.name for one in KEPT if GROWTH.fits(one, 20 * GIB)] == ["middle"]
    assert [GROWTH.reached_after(one, 20 * GIB) for one in KEPT] == [180, 18, 1]


def test_a_job_that_needs_more_from_the_start_does_not_grow() -> None:
    """Nothing that is kept explains less than the job needs."""
    assert GROWTH.a_step(1 * GIB) == (0.0, 0.0)
    assert not any(GROWTH.fits(one, 1 * GIB) for one in KEPT)
    assert len(GROWTH.ranked(1 * GIB)) == len(KEPT)
