"""Deadlines: how long a phase may be without progress."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import (
    DeadlineSettings,
    Occurrence,
    computing_deadline_seconds,
    deadline_seconds,
    frozen_deadline_seconds,
    quiet_deadline_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations

SETTINGS = DeadlineSettings()
FIRST, LATER = Occurrence.first, Occurrence.later
histories = st.lists(st.floats(min_value=1e-4, max_value=8000.0), min_size=1, max_size=80)


def later(values: list[float], settings: DeadlineSettings = SETTINGS) -> float:
    """The deadline of a later occurrence after these."""
    return deadline_seconds(Phase.reward, Durations.of(values), LATER, settings)


def test_a_pause_of_most_of_a_minute_is_no_hang_in_short_phases() -> None:
    """A sandbox, a shard or a disk may take that long once; more is a hang."""
    assert later([2.0] + [0.03, 0.05, 0.08, 0.05] * 5) == 60.0


@given(histories)
def test_an_observed_duration_is_never_a_hang(values: list[float]) -> None:
    """For any ceiling: five times the longest duration, and the first occurrence again."""
    tight = DeadlineSettings(ceiling_seconds=60.0)
    limit = later(values, tight)
    assert limit >= 5.0 * max(values[1:], default=0.0)
    assert limit >= 1.5 * values[0]


@given(histories, st.sampled_from(list(Phase)), st.sampled_from(list(Occurrence)))
def test_a_deadline_is_finite_and_not_below_the_floor(
    values: list[float], phase: Phase, occurrence: Occurrence
) -> None:
    """For any history: a deadline of zero would end every run, an infinite one none."""
    limit = deadline_seconds(phase, Durations.of(values), occurrence, SETTINGS)
    assert math.isfinite(limit)
    assert limit >= SETTINGS.floor_seconds


@given(histories.filter(lambda values: len(values) > 1))
def test_a_first_occurrence_gets_no_less_than_a_later_one(values: list[float]) -> None:
    """It does the same work and more."""
    durations = Durations.of(values)
    first = deadline_seconds(Phase.reward, durations, FIRST, SETTINGS)
    assert first >= deadline_seconds(Phase.reward, durations, LATER, SETTINGS)


@given(histories, st.floats(min_value=1e-4, max_value=8000.0))
def test_the_margin_for_outliers_is_limited_by_the_ceiling(values: list[float], ceiling: float) -> None:
    """A longer deadline requires observed durations."""
    settings = DeadlineSettings(ceiling_seconds=max(ceiling, 60.0))
    shown = max(5.0 * max(values[1:], default=0.0), 1.5 * values[0])
    assert later(values, settings) <= max(settings.ceiling_seconds, shown) * (1 + 1e-9)


def test_a_first_outlier_of_twenty_medians_is_no_hang() -> None:
    """After 20 and after 2,000 steps, for phases much longer than the floor."""
    for number in (20, 2_000):
        assert later([30.0] * (number + 1)) > 20 * 30.0


def test_observed_outliers_do_not_multiply_the_margin() -> None:
    """Thirty times an outlier of twenty medians would be 600 medians."""
    usual = [0.5] * 2_000
    assert later([*usual, 20.0]) == pytest.approx(100.0)


def test_a_small_sample_has_a_larger_margin() -> None:
    """Three checkpoints say little about the fourth."""
    assert later([4.0] * 4) > 2 * later([4.0] * 21)


@pytest.mark.parametrize(("number", "margin"), [(5, 2.0), (15, math.sqrt(20.0 / 15.0)), (20, 1.0), (80, 1.0)])
def test_the_margin_shrinks_with_the_root_of_the_sample(number: int, margin: float) -> None:
    """From twenty occurrences on it is thirty times a usual long duration."""
    assert later([4.0] * (number + 1)) == pytest.approx(30.0 * 4.0 * margin)


def test_the_usual_duration_is_a_long_one() -> None:
    """Half of the occurrences are short, and the margin is a multiple of the others."""
    assert later([1.0] * 51 + [10.0] * 50) == pytest.approx(300.0)


def test_after_only_a_first_occurrence_the_second_gets_more_than_the_floor() -> None:
    """The first checkpoint took 10 s, and there is no other observation."""
    assert later([10.0]) > 20 * 10.0
    assert later([0.01]) == SETTINGS.first_floor_seconds


def test_a_slow_first_occurrence_may_repeat() -> None:
    """A recompilation between steps of 50 ms takes as long as the first compilation."""
    assert later([80.0] + [0.05] * 1000) == 120.0


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.generate, 1800.0), (Phase.startup, 3600.0), (Phase.eval, 3600.0), (Phase.idle, 3600.0),
    ],
)  # fmt: skip
def test_without_observations_the_settings_apply(phase: Phase, expected: float) -> None:
    """For None and an empty record alike, and for first and later occurrences."""
    for durations in (None, Durations()):
        for occurrence in Occurrence:
            assert deadline_seconds(phase, durations, occurrence, SETTINGS) == expected


def test_a_first_occurrence_is_compared_with_earlier_first_ones() -> None:
    """A start-up of 20 s is hung after 200 s; one of 20 ms after the floor for first occurrences."""
    assert deadline_seconds(Phase.startup, Durations.of([20.0]), FIRST, SETTINGS) == 200.0
    assert deadline_seconds(Phase.data, Durations.of([0.02]), FIRST, SETTINGS) == 60.0


def test_the_scripts_own_time_is_not_learned() -> None:
    """Between two calls a script may do anything."""
    assert deadline_seconds(Phase.idle, Durations.of([0.1] * 50), LATER, SETTINGS) == 3600.0


@pytest.mark.parametrize("name", list(DeadlineSettings.__dataclass_fields__))
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_setting_that_is_no_positive_number_is_rejected_by_name(name: str, value: float) -> None:
    """NaN compares false with everything: such a deadline would never pass."""
    with pytest.raises(ValueError, match=name):
        DeadlineSettings(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"floor_seconds": 4000.0}, {"ceiling_seconds": 5.0}, {"first_floor_seconds": 4000.0},
        {"factor_seen": 31.0}, {"factor_first": 0.5}, {"factor_again": 0.9},
    ],
)  # fmt: skip
def test_contradictory_settings_are_rejected(changes: dict[str, float]) -> None:
    """No deadline exists between a floor and a lower ceiling."""
    with pytest.raises(ValueError, match="must"):
        DeadlineSettings(**changes)


def test_the_defaults_are_the_documented_ones() -> None:
    """docs/internals/watchdog.md states them, and `launch --help` those that have a flag."""
    assert dataclasses.asdict(SETTINGS) == {
        "floor_seconds": 60.0, "connected_seconds": 300.0, "frozen_seconds": 20.0, "ceiling_seconds": 3600.0,
        "first_seconds": 1800.0, "startup_seconds": 3600.0, "evaluation_seconds": 3600.0,
        "first_floor_seconds": 60.0, "exit_seconds": 60.0, "exit_connected_seconds": 300.0,
        "factor_seen": 5.0, "factor_unseen": 30.0, "factor_first": 10.0, "factor_again": 1.5,
        "factor_ended": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first_seconds", "occurrence", "ceiling_seconds", "expected"),
    [
        (4.0, LATER, 3600.0, 30.0 * 4.0 * math.sqrt(20.0)),
        (4.0, LATER, 100.0, 100.0),
        (1.0, LATER, 60.0, 60.0),
        (4.0, FIRST, 3600.0, 60.0),
        (100.0, FIRST, 3600.0, 1000.0),
        (100.0, FIRST, 120.0, 150.0),
    ],
)
def test_a_deadline_learned_from_one_first_occurrence(
    first_seconds: float, occurrence: Occurrence, ceiling_seconds: float, expected: float
) -> None:
    """The first stands for one occurrence; its own factor and floor bound the next first one."""
    settings = DeadlineSettings(ceiling_seconds=ceiling_seconds)
    durations = Durations.of([first_seconds])
    assert deadline_seconds(Phase.reward, durations, occurrence, settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [(Phase.reward, 1800.0), (Phase.cleanup, 1800.0), (Phase.startup, 3600.0), (Phase.eval, 3600.0)],
)
def test_a_first_occurrence_without_a_known_first_gets_the_unlearned_deadline(
    phase: Phase, expected: float
) -> None:
    """Later occurrences were counted, but every attempt ended before it recorded its first one."""
    durations = dataclasses.replace(Durations.of([0.0, 0.5, 0.5]), first_seconds=0.0)
    assert deadline_seconds(phase, durations, FIRST, SETTINGS) == expected
    assert deadline_seconds(phase, None, FIRST, SETTINGS) == expected


def test_a_factor_of_one_is_accepted() -> None:
    """It means: no longer than what was seen."""
    assert DeadlineSettings(factor_seen=1.0, factor_again=1.0).factor_seen == 1.0


@given(
    histories,
    st.sampled_from(list(Phase)),
    st.sampled_from(list(Occurrence)),
    st.floats(min_value=1.0, max_value=1e5),
)
def test_what_a_deadline_ended_is_never_ended_before_four_times_as_long_again(
    values: list[float], phase: Phase, occurrence: Occurrence, ended: float
) -> None:
    """By any rule, with and without other observations: a legitimate pause costs one recovery."""
    for known in (Durations.of(values), Durations()):
        durations = known.ended_after(ended)
        limits = [
            deadline_seconds(phase, durations, occurrence, SETTINGS),
            computing_deadline_seconds(phase, durations, occurrence, SETTINGS),
            *(quiet_deadline_seconds(durations, SETTINGS, connected=here) for here in (True, False)),
            frozen_deadline_seconds(durations, SETTINGS),
        ]
        assert min(limits) >= 4.0 * ended


@given(histories)
def test_a_quiet_rank_is_given_what_its_phase_has_shown(values: list[float]) -> None:
    """One and a half times the longest occurrence, the first one included; the floor at least."""
    limit = quiet_deadline_seconds(Durations.of(values), SETTINGS, connected=False)
    assert limit == pytest.approx(max(60.0, 1.5 * max(values)))
    assert quiet_deadline_seconds(Durations.of(values), SETTINGS, connected=True) == max(limit, 300.0)


@pytest.mark.parametrize(
    ("floor", "expected"),
    [(60.0, 20.0), (4.0, 4.0), (20.0, 20.0), (30.0, 20.0), (75.5, 75.5 / 3), (300.0, 100.0)],
)
def test_a_frozen_interpreter_is_ended_after_a_third_of_the_floor(floor: float, expected: float) -> None:
    """Twenty seconds by default: what the phase has shown does not count, as its heartbeat went on."""
    settings = DeadlineSettings(floor_seconds=floor)
    known = Durations.of([500.0, 500.0])
    assert frozen_deadline_seconds(known, settings) == expected


def test_a_low_floor_lowers_the_quiet_deadline_in_every_phase() -> None:
    """Unless the process is connected to outside."""
    settings = DeadlineSettings(floor_seconds=4.0)
    assert quiet_deadline_seconds(None, settings, connected=False) == 4.0
    assert quiet_deadline_seconds(None, settings, connected=True) == 300.0


@pytest.mark.parametrize(("floor", "expected"), [(4.0, 20.0), (60.0, 300.0), (100.0, 300.0), (400.0, 400.0)])
def test_a_rank_that_computes_in_a_step_has_five_floors_of_time(floor: float, expected: float) -> None:
    """At most five minutes, and never less than the floor; so has a rank with a connection to outside."""
    settings = DeadlineSettings(floor_seconds=floor)
    known = Durations.of([0.1] * 50)
    assert settings.outside_limit_seconds == expected
    assert computing_deadline_seconds(Phase.generate, known, LATER, settings) == expected


def test_a_phase_that_other_code_works_in_may_compute_for_half_an_hour() -> None:
    """Whatever it has shown: a data set is tokenized once."""
    known = Durations.of([0.1] * 50)
    assert computing_deadline_seconds(Phase.data, known, LATER, SETTINGS) == 1800.0
    assert computing_deadline_seconds(Phase.data, Durations.of([500.0] * 50), LATER, SETTINGS) == 3600.0


def test_a_callback_has_the_deadline_of_other_first_occurrences() -> None:
    """It is learned like any phase; without observations it is given half an hour."""
    assert deadline_seconds(Phase.callback, None, FIRST, SETTINGS) == 1800.0
    assert deadline_seconds(Phase.callback, Durations.of([0.1] * 22), LATER, SETTINGS) == 60.0
