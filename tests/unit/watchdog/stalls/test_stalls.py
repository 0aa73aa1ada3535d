"""Which ranks hang, whom others wait for, deadlines of phases, and endless steps; see the text files."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.stall_shell import StallShell
from support.builders.watchdog.step_shell import StepShell
from support.transcripts import Story, stories

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import (
    DeadlineSettings,
    Occurrence,
    Tokens,
    computing_deadline_seconds,
    deadline_seconds,
    endless_deadline_seconds,
    frozen_deadline_seconds,
    quiet_deadline_seconds,
    unusual_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations

SETTINGS = DeadlineSettings()
histories = st.lists(st.floats(min_value=1e-4, max_value=8000.0), min_size=1, max_size=80)


@stories(__file__, "stalls.txt")
def test_stalls(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(StallShell(), word)


@stories(__file__, "steps.txt")
def test_steps(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(StepShell(), word)


@given(
    st.dictionaries(
        st.integers(0, 3),
        st.tuples(
            st.sampled_from(list(Phase)), st.floats(0, 500), st.booleans(), st.booleans(),
            st.sampled_from("RSDTZ"),
        ),
        min_size=1,
    )
)  # fmt: skip
def test_only_overdue_ranks_that_do_not_wait_are_ever_blamed(
    seen: dict[int, tuple[Phase, float, bool, bool, str]],
) -> None:
    """For any mixture of phases, waits, states and unreadable slots."""
    shell = StallShell()
    for rank, (phase, ago, readable, waits, state) in seen.items():
        words = [f"{phase.name}:{ago}", *([] if readable else ["unreadable"])]
        shell.rank(str(rank), *words, process=state, waits="yes" if waits else "no")
    said = shell.look().splitlines()
    culprits = (
        [] if said == ["nothing"] else [int(n) for n in said[0].split("(")[1].split(")")[0].split(",") if n]
    )
    for rank in culprits:
        phase, ago, readable, waits, state = seen[rank]
        assert readable
        assert ago > 8.0
        assert state == "T" or not (state == "Z" or waits or phase is Phase.vote)


@given(histories, st.floats(min_value=60.0, max_value=8000.0))
def test_an_observed_duration_is_never_a_hang(values: list[float], ceiling: float) -> None:
    """For any ceiling: five times the longest duration, and the first occurrence again. A longer deadline
    than the ceiling requires observed durations, and a first occurrence gets no less than a later one.
    """
    settings = DeadlineSettings(ceiling_seconds=ceiling)
    first, limit = (
        deadline_seconds(Phase.reward, Durations.of(values), one, settings)
        for one in (Occurrence.first, Occurrence.later)
    )
    shown = max(5.0 * max(values[1:], default=0.0), 1.5 * values[0])
    assert shown <= limit <= max(ceiling, shown) * (1 + 1e-9)
    assert first >= limit or len(values) == 1


@given(histories, st.sampled_from(list(Occurrence)), st.integers(0, 10**6), st.floats(1.0, 1e5))
def test_a_generation_is_ended_after_it_was_told_of_and_never_before_30_times_the_longest(
    values: list[float], occurrence: Occurrence, passes: int, limit: float
) -> None:
    """Nor before the deadline without progress, whatever its tokens are; nothing is told before one is
    known.
    """
    known = Phase.generate, Durations.of(values), occurrence, SETTINGS
    tokens = Tokens(passes=passes, limit=limit)
    ended, told = endless_deadline_seconds(*known, tokens), unusual_seconds(*known)
    longest = max(values[1:], default=values[0])
    assert ended >= told >= max(30.0, 30.0 * longest)
    assert ended >= deadline_seconds(*known)
    assert math.isfinite(ended) or tokens.end_is_near
    nothing = Phase.generate, Durations(), occurrence, SETTINGS
    assert math.isinf(endless_deadline_seconds(*nothing, tokens))
    assert math.isinf(unusual_seconds(*nothing))


@given(histories, st.sampled_from(list(Phase)), st.sampled_from(list(Occurrence)), st.floats(1.0, 1e5))
def test_a_deadline_is_finite_and_four_times_as_long_as_what_it_has_ended(
    values: list[float], phase: Phase, occurrence: Occurrence, ended: float
) -> None:
    """By any rule, with and without other observations; a deadline of zero would end every run."""
    for known in (Durations.of(values), Durations()):
        limits = [
            rule
            for durations in (known.ended_after(ended), known)
            for rule in (
                deadline_seconds(phase, durations, occurrence, SETTINGS),
                computing_deadline_seconds(phase, durations, occurrence, SETTINGS),
                quiet_deadline_seconds(durations, SETTINGS, connected=True),
                quiet_deadline_seconds(durations, SETTINGS, connected=False),
                frozen_deadline_seconds(durations, SETTINGS),
            )
        ]
        assert min(limits[:5]) >= 4.0 * ended
        assert math.isfinite(max(limits))
        assert min(limits[5:9]) >= SETTINGS.floor_seconds


def test_the_defaults_are_the_documented_ones() -> None:
    """docs/internals/watchdog.md states them, and `launch --help` those that have a flag."""
    assert dataclasses.asdict(SETTINGS) == {
        "floor_seconds": 60.0, "connected_seconds": 300.0, "frozen_seconds": 20.0, "ceiling_seconds": 3600.0,
        "first_seconds": 1800.0, "startup_seconds": 3600.0, "evaluation_seconds": 3600.0,
        "first_floor_seconds": 60.0, "exit_seconds": 60.0, "exit_connected_seconds": 300.0,
        "factor_seen": 5.0, "factor_unseen": 30.0, "factor_first": 10.0, "factor_again": 1.5,
        "factor_ended": 5.0,
    }  # fmt: skip
