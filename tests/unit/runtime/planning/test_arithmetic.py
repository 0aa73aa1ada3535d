"""The pure parts: timelines, the replay of the allocator, fits, and the checks of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning._allocator import unused_bytes
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.prediction import Fit, Point, fit
from grpo_run.runtime.planning.timeline import AllocationTimeline, Mark, highest, peaks

MIB = 1 << 20


def _timeline(events: list[int], sizes: list[int]) -> AllocationTimeline:
    return AllocationTimeline(
        sizes=sizes,
        kinds=["activations"] * len(sizes),
        events=events,
        marks=[Mark(event=0, step=0, phase="forward"), Mark(event=len(events), step=0, phase="end")],
    )


def test_a_peak_counts_what_is_alive_at_once() -> None:
    """The second allocation is freed before the third."""
    found = highest(peaks(_timeline([0, 1, ~1, 2], [10, 5, 3]), 0))
    assert found["forward"].total == 15


def test_a_phase_begins_with_what_is_alive() -> None:
    """A phase that allocates nothing has the peak of its beginning."""
    timeline = _timeline([0], [10])
    timeline.marks.insert(1, Mark(event=1, step=0, phase="backward"))
    assert highest(peaks(timeline, 0))["backward"].total == 10


def test_a_freed_block_is_used_again() -> None:
    """Two allocations of 30 MiB, one after the other, need one segment."""
    assert unused_bytes(_timeline([0, ~0, 1], [30 * MIB, 30 * MIB])) == 0


def test_a_block_that_is_too_small_cannot_be_used() -> None:
    """30 MiB were freed, and 40 MiB need another segment."""
    assert unused_bytes(_timeline([0, ~0, 1], [30 * MIB, 40 * MIB])) == 30 * MIB


def test_a_fit_finds_its_terms_and_says_how_far_another_point_is() -> None:
    """Three points decide three terms."""
    true = Fit(fixed_bytes=1e9, token_bytes=2e5, pair_bytes=3.0)
    points = [
        Point(rows=r, length=n, peak_bytes=true.at(r, n)) for r, n in ((8, 1024), (8, 1792), (16, 1024))
    ]
    off = Point(rows=2, length=4096, peak_bytes=true.at(2, 4096) / 1.1)
    found = fit(points[0], points[1], points[2], [off])
    assert (found.fixed_bytes, found.token_bytes, found.pair_bytes) == pytest.approx((1e9, 2e5, 3.0))
    assert found.residual == pytest.approx(0.1)


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"completion": 1 << 30}, {"weights": "int4"}, {"vllm_share": 1.5}, {"layout": "tp"}],
)
def test_an_impossible_job_is_refused(wrong: dict[str, object]) -> None:
    """With one line."""
    with pytest.raises(ConfigError, match="expected"):
        replace(Job(batch=1, prompt=1, completion=1), **wrong)  # type: ignore[arg-type]
