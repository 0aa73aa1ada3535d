"""Histograms of phase durations."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.watchdog.stalls.durations import (
    BUCKETS,
    Durations,
    bucket_of,
    lower_edge_seconds,
    merge_ranks,
    upper_edge_seconds,
)

seconds = st.floats(min_value=0.0, max_value=20_000.0)
attempts = st.lists(seconds, max_size=60)


@given(seconds)
def test_a_duration_lies_between_the_edges_of_its_bucket(value: float) -> None:
    """Deadlines use the edges of buckets (the last digit may be rounded)."""
    bucket = bucket_of(value)
    assert lower_edge_seconds(bucket) * (1 - 1e-12) <= value < upper_edge_seconds(bucket) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("value", "bucket"),
    [
        (-1.0, 0), (0.0, 0), (0.000999, 0), (0.001, 1), (0.00141, 1), (0.00142, 2), (0.002, 3), (1.0, 20),
        (8388.0, 46), (8389.0, 47), (1e30, 47), (math.inf, 47), (math.nan, 0),
    ],
)  # fmt: skip
def test_buckets_are_half_octaves_from_a_millisecond(value: float, bucket: int) -> None:
    """The board uses the same scale; no duration makes it raise."""
    assert bucket_of(value) == bucket


def test_every_bucket_can_be_reached() -> None:
    """All 48 counters are used."""
    middles = [0.0005] + [0.001 * 2 ** ((bucket - 0.5) / 2) for bucket in range(1, BUCKETS)]
    assert [bucket_of(middle) for middle in middles] == list(range(BUCKETS))


def test_the_first_occurrence_is_stored_separately() -> None:
    """It includes compilation and would otherwise be the maximum."""
    durations = Durations.of([90.0, 0.05, 0.07])
    assert (durations.first_seconds, durations.max_seconds, durations.count) == (90.0, 0.07, 2)
    assert durations.quantile(1.0) < 0.1


def test_without_occurrences_everything_is_zero() -> None:
    """An empty board contains zeros."""
    durations = Durations.of([])
    assert durations == Durations()
    assert (durations.count, durations.quantile(0.99), durations.longest_seconds,
    durations.median_seconds) == (
        0, 0.0, 0.0, 0.0,
    )  # fmt: skip


@given(st.lists(seconds, min_size=2, max_size=60), st.floats(min_value=0.0, max_value=1.0))
def test_a_quantile_is_not_below_the_true_one(values: list[float], fraction: float) -> None:
    """And at most half an octave above it, except below a millisecond."""
    rest = sorted(values[1:])
    exact = rest[max(1, math.ceil(fraction * len(rest) - 1e-9)) - 1]
    found = Durations.of(values).quantile(fraction)
    assert found >= exact * (1 - 1e-12)
    assert found <= max(0.001, exact * math.sqrt(2) * (1 + 1e-12), rest[-1] if exact > 8000 else 0.0)


def test_an_outlier_in_a_thousand_stays_out_of_the_99th_percentile() -> None:
    """The margin is a multiple of a usual occurrence, with or without an outlier."""
    usual = [0.05] * 1000
    assert Durations.of([*usual, 1.0]).quantile(0.99) == Durations.of(usual).quantile(0.99)


def test_the_longest_counts_before_its_exact_value_is_written() -> None:
    """A rank updates the counter before the maximum; in between the counter is used."""
    counts = tuple(1 if bucket == bucket_of(600.0) else 0 for bucket in range(BUCKETS))
    assert Durations(counts, 1.0, 0.05).longest_seconds > 400.0


@given(st.lists(attempts, max_size=5))
def test_merging_ranks_takes_the_slowest_of_them(ranks: list[list[float]]) -> None:
    """As many occurrences as the rank with the most, and no quantile below that rank's."""
    many = [Durations.of(values) for values in ranks]
    merged = merge_ranks(many)
    assert merged.count == max((one.count for one in many), default=0)
    assert merged.max_seconds == max((one.max_seconds for one in many), default=0.0)
    assert merged.first_seconds == max((one.first_seconds for one in many), default=0.0)
    assert min(merged.counts) >= 0
    for one in many:
        if one.count == merged.count:
            assert all(merged.quantile(q) >= one.quantile(q) for q in (0.0, 0.5, 0.9, 0.99, 1.0))


def test_a_short_history_does_not_replace_a_long_one() -> None:
    """One slow occurrence on another rank is one occurrence."""
    assert merge_ranks([Durations.of([1.0] * 4)] * 8).count == 3, "ranks in step do not multiply occurrences"
    merged = merge_ranks([Durations.of([1.0] * 1001), Durations.of([1.0, 30.0])])
    assert merged.quantile(0.99) == upper_edge_seconds(bucket_of(1.0))
    assert merged.max_seconds == 30.0


@given(attempts, attempts, attempts)
def test_attempts_add_up_in_any_grouping(one: list[float], two: list[float], three: list[float]) -> None:
    """The journal is replayed from the start; the supervisor adds the current attempt last."""
    a, b, c = Durations.of(one), Durations.of(two), Durations.of(three)
    assert a.then(b).then(c) == a.then(b.then(c))
    assert a.then(b).count == a.count + b.count
    assert a.then(b).max_seconds == max(a.max_seconds, b.max_seconds)


@given(attempts)
def test_durations_survive_the_journal(values: list[float]) -> None:
    """They are exact to the microsecond after a round trip through JSON."""
    durations = Durations.of(values)
    again = Durations.from_json(json.loads(json.dumps(durations.as_json())))
    assert again.counts == durations.counts
    assert again.max_seconds == pytest.approx(durations.max_seconds, abs=1e-6)
    assert again.first_seconds == pytest.approx(durations.first_seconds, abs=1e-6)


GOOD = {"counts": {"3": 2}, "first_seconds": 1.0, "max_seconds": 0.002}


@pytest.mark.parametrize(
    "bad",
    [
        None, [], "text", {}, {"counts": {}, "first_seconds": 1.0}, GOOD | {"extra": 1},
        *(GOOD | {"counts": one} for one in ([1], {}, {"48": 1}, {"-1": 1}, {"03": 1}, {3: 1})),
        *(GOOD | {"counts": {"3": one}} for one in (-1, 0, 1.5, True, 2**60)),
        *(GOOD | {"first_seconds": one} for one in (-1, math.nan)),
        *(GOOD | {"max_seconds": one} for one in (math.inf, "1", True)),
    ],
)  # fmt: skip
def test_invalid_durations_are_rejected(bad: object) -> None:
    """A deadline learned from a damaged line could be anything."""
    with pytest.raises(ValueError, match="durations"):
        Durations.from_json(bad)
    assert Durations.from_json(GOOD).count == 2


def test_an_end_by_a_deadline_is_remembered_apart_from_what_was_measured() -> None:
    """The longest is kept over attempts, ranks and the journal; nothing else changes."""
    seen = Durations.of([9.0, 1.0, 2.0])
    ended = seen.ended_after(30.0)
    assert (ended.max_seconds, ended.counts, ended.first_seconds) == (2.0, seen.counts, 9.0)
    assert ended.ended_after(20.0) == ended
    assert seen.then(ended).then(seen).ended_seconds == 30.0
    assert merge_ranks([seen, ended]).ended_seconds == 30.0
    for durations in (ended, Durations().ended_after(60.0), seen):
        assert Durations.from_json(durations.as_json()) == durations
    assert "ended_seconds" not in seen.as_json(), "older versions refuse unknown fields"
