"""Injected faults: their canonical text, and which can still happen in a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.injections._faults import KINDS, MEMORY_PHASES
from grpo_run.runtime.features.injections._injection import (
    GRAMMAR,
    MAX_STEP,
    TOKEN_PHASES,
    Injection,
    help_text,
    parse_all,
    parse_injection,
    remaining,
)
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase


@given(
    kind=st.sampled_from(sorted(KINDS)),
    rank=st.integers(0, 10**6),
    step=st.integers(1, MAX_STEP),
    phase=st.sampled_from([phase for phase in Phase if phase is not Phase.startup]),
    memory_phase=st.sampled_from(list(MEMORY_PHASES.values())),
    seconds=st.floats(0.001, 604_800.0) | st.none(),
    rows=st.integers(0, 10**6),
    tokens=st.integers(0, 10**9),
)
def test_canonical_text_is_parsed_to_the_same_injection(
    kind: str,
    rank: int,
    step: int,
    phase: Phase,
    memory_phase: MemoryPhase,
    seconds: float | None,
    rows: int,
    tokens: int,
) -> None:
    """The test covers every kind, place, duration, and number of rows or tokens."""
    known = KINDS[kind]
    where = known.phase if known.fixed_phase else memory_phase if known.takes_rows else phase
    if not known.takes_rows or where is MemoryPhase.optimizer:
        rows = 0
    if rows or not known.takes_rows or where not in TOKEN_PHASES:
        tokens = 0
    made = Injection(
        name=kind,
        rank=rank,
        step=step,
        phase=where,
        seconds=known.seconds or 0.0 if known.seconds is None or seconds is None else round(seconds, 3),
        rows=rows,
        tokens=tokens,
    )
    assert parse_injection(str(made)) == made
    assert str(parse_injection(str(made))) == str(made)


def test_the_help_has_one_line_per_kind() -> None:
    """A line has the kind's sentence and default phase."""
    usage, *lines = help_text().splitlines()
    assert usage.startswith(GRAMMAR)
    assert [line.split()[0] for line in lines] == list(KINDS)
    for line, kind in zip(lines, KINDS.values(), strict=True):
        assert len(kind.sentence.split()) >= 3
        assert kind.sentence in line
        assert line.endswith(f"({kind.phase.name})")


def test_the_defaults_of_every_kind_are_valid() -> None:
    for name, kind in KINDS.items():
        assert parse_injection(f"{name}@rank0:step1").phase is kind.phase


def test_fired_injections_do_not_remain() -> None:
    """They are identified by canonical text; the order is kept."""
    injections = parse_all(["kill@rank1:step7", "hang@rank0:step2:seconds=5", "hang@rank0:step2"])
    left = remaining(injections, {"hang@rank0:step2:seconds=5", "kill@rank9:step7"})
    assert [str(injection) for injection in left] == ["kill@rank1:step7", "hang@rank0:step2"]
    assert remaining(injections, ()) == injections
    assert remaining(injections, {str(injection) for injection in injections}) == ()


def test_a_number_without_an_end_is_refused_as_any_other_text() -> None:
    """Python converts no number of more than 4,300 digits."""
    with pytest.raises(ConfigError, match="write KIND@rankR:stepN"):
        parse_injection("kill@rank1:step" + "9" * 5000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill@rank0:step1:phase=startup", "kill does not happen in 'startup'; one of data, generate"),
        ("hang@rank0:step1:seconds=0.0001", "seconds=0.0001 is not between 0.001 and 604800"),
    ],
)
def test_a_refusal_quotes_what_was_given_and_lists_what_is_possible(text: str, said: str) -> None:
    """A phase in which nothing can happen is not in the list; a duration is not rounded before it is told."""
    with pytest.raises(ConfigError) as caught:
        parse_injection(text)
    assert said in str(caught.value)
    assert "startup" not in str(caught.value).partition(";")[2]
