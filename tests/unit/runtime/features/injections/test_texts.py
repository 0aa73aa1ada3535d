"""Injected faults: their text, what is refused, and which can still happen in a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.features.injections._faults import KINDS, MEMORY_PHASES
from grpo_run.runtime.features.injections._injection import (
    MAX_STEP,
    TOKEN_PHASES,
    Injection,
    check,
    help_text,
    parse_all,
    parse_injection,
    remaining,
)
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase


def refusal(text: str) -> str:
    """The line with which this text is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_injection(text)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("--inject ")
    assert isinstance(caught.value, UsageError)
    return line


def test_phase_and_duration_default_to_the_kinds() -> None:
    """The help shows the same example."""
    found = parse_injection("kill@rank1:step7")
    assert (found.name, found.rank, found.step, found.phase, found.seconds) == (
        "kill",
        1,
        7,
        Phase.forward_backward,
        0.0,
    )
    assert parse_injection("hang@rank0:step1").seconds == math.inf


@pytest.mark.parametrize("order", ["phase=score:seconds=2.5", "seconds=2.5:phase=score"])
def test_phase_and_seconds_may_be_in_either_order(order: str) -> None:
    """The canonical text is the same."""
    found = parse_injection(f"hang@rank0:step3:{order}")
    assert (found.phase, found.seconds) == (Phase.score, 2.5)
    assert str(found) == "hang@rank0:step3:phase=score:seconds=2.5"


@pytest.mark.parametrize(
    "text", ["slow@rank0:step3:phase=reward", "slow@rank00:step03:seconds=1.0", "slow@rank0:step3:seconds=1"]
)
def test_equal_injections_have_one_canonical_text(text: str) -> None:
    """Otherwise one would fire twice in a run."""
    assert str(parse_injection(text)) == "slow@rank0:step3"


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no such kind ''"),
        ("kil@rank1:step7", "did you mean kill?"),
        ("mismatch_shape@rank1:step7", "did you mean mismatch-shape?"),
        ("mismatch@rank1:step7", "did you mean mismatch-operation or mismatch-shape?"),
        ("Kill@rank1:step7", "did you mean kill?"),
        ("zzz@rank1:step7", "one of kill, exception"),
        ("kill", "write KIND@rankR:stepN"),
        ("kill@rank1", "write KIND@rankR:stepN"),
        ("kill@step7:rank1", "write KIND@rankR:stepN"),
        ("kill@rank-1:step7", "write KIND@rankR:stepN"),
        ("kill@rank1:step7.5", "write KIND@rankR:stepN"),
        ("kill@rank1:step\u0667", "write KIND@rankR:stepN"),
        ("kill@rank1:step" + "9" * 5000, "write KIND@rankR:stepN"),
        ("kill@rank1:step7 ", "write KIND@rankR:stepN"),
        ("kill@rank1:step7:when=now", "for example kill@rank1:step7"),
        ("kill@rank1:step9999999999", "steps from 1 to"),
        ("kill@rank1:step0", "steps from 1 to"),
        ("kill@rank1:step7:phase=rewards", "did you mean reward?"),
        ("kill@rank1:step7:phase=startup", "happens in phase"),
        ("kill@rank1:step7:seconds=3", "kill takes no seconds"),
        ("gil@rank1:step7:seconds=3", "gil takes no seconds"),
        ("hang@rank1:step7:seconds=0", "is not between"),
        ("hang@rank1:step7:seconds=0.0001", "is not between"),
        ("hang@rank1:step7:seconds=9999999", "is not between"),
        ("hang@rank1:step7:seconds=-1", "write KIND@rankR:stepN"),
        ("hang@rank1:step7:seconds=inf", "write KIND@rankR:stepN"),
        ("hang@rank1:step7:seconds=1e3", "write KIND@rankR:stepN"),
        ("slow-generation@rank1:step7:phase=reward", "happens in phase generate only"),
        ("oom@rank1:step3:phase=reward", "no such phase 'reward'"),
        ("oom@rank1:step3:phase=backwards", "did you mean backward?"),
        ("kill@rank1:step3:phase=backward", "no such phase 'backward'"),
        ("oom@rank1:step3:rows=0", "with rows=N or tokens=N"),
        ("oom@rank1:step3:phase=optimizer:rows=2", "takes no rows in phase optimizer"),
        ("oom@rank1:step3:tokens=0", "with rows=N or tokens=N"),
        ("oom@rank1:step3:tokens=2000000000", "tokens=2000000000 is not between 1 and 1000000000"),
        ("oom@rank1:step3:phase=score:tokens=2", "takes no tokens in phase score"),
        ("oom@rank1:step3:rows=2:tokens=2", "give rows or tokens, not both"),
        ("oom@rank1:step3:seconds=2", "takes no seconds"),
        ("kill@rank1:step3:rows=2", "kill takes no rows"),
    ],
)
def test_a_wrong_injection_is_refused_in_one_line(text: str, says: str) -> None:
    """The line holds the text and what to write. The board does not tell forward and backward apart, so only
    exhausted memory happens in them; rows count where rows are computed.
    """
    assert says in refusal(text)


def test_a_repeated_injection_is_refused() -> None:
    """It fires once in a run, however it is written."""
    with pytest.raises(ConfigError, match="given twice"):
        parse_all(["kill@rank1:step7", "kill@rank1:step7:phase=forward_backward"])


def test_two_collectives_at_one_place_are_refused() -> None:
    """The other ranks cannot take part in both."""
    with pytest.raises(ConfigError, match=r"skip@rank0:step5 is a collective at the same step and phase"):
        parse_all(["skip@rank0:step5", "mismatch-shape@rank1:step5"])
    elsewhere = ["mismatch-shape@rank1:step6", "mismatch-shape@rank1:step5:phase=reward"]
    parse_all(["skip@rank0:step5", *elsewhere, "kill@rank0:step5"])


def test_the_order_of_the_options_is_kept() -> None:
    """Injections at one place happen in this order."""
    texts = ["kill@rank1:step7", "hang@rank0:step2", "mismatch-shape@rank1:step3"]
    assert [str(injection) for injection in parse_all(texts)] == texts
    assert parse_all([]) == ()


def test_the_help_has_one_line_per_kind() -> None:
    """A line has the kind's sentence and default phase."""
    lines = help_text().splitlines()
    assert [line.split()[0] for line in lines] == list(KINDS)
    for line, kind in zip(lines, KINDS.values(), strict=True):
        assert len(kind.sentence.split()) >= 3
        assert kind.sentence in line
        assert line.endswith(f"({kind.phase.name})")


def test_the_defaults_of_every_kind_are_valid() -> None:
    for name, kind in KINDS.items():
        assert parse_injection(f"{name}@rank0:step1").phase is kind.phase


@pytest.mark.parametrize(
    ("text", "world_size", "says"),
    [
        ("kill@rank2:step7", 2, "there is no rank 2; ranks are 0 to 1"),
        ("kill@rank1:step7", 1, "the only rank is 0"),
        ("mismatch-shape@rank0:step7", 1, "mismatch-shape needs at least 2 ranks"),
        ("skip@rank0:step7", 1, "skip needs at least 2 ranks"),
    ],
)
def test_an_injection_that_cannot_happen_is_refused(text: str, world_size: int, says: str) -> None:
    """The rank does not exist, or a collective fault has no second rank."""
    with pytest.raises(ConfigError, match=says):
        check(parse_all([text]), world_size)


def test_every_existing_rank_is_accepted() -> None:
    """The last rank is accepted too."""
    check(parse_all(["kill@rank1:step7", "skip@rank0:step7", "hang@rank1:step7"]), 2)


def test_fired_injections_do_not_remain() -> None:
    """They are identified by canonical text; the order is kept."""
    injections = parse_all(["kill@rank1:step7", "hang@rank0:step2:seconds=5", "hang@rank0:step2"])
    left = remaining(injections, {"hang@rank0:step2:seconds=5", "kill@rank9:step7"})
    assert [str(injection) for injection in left] == ["kill@rank1:step7", "hang@rank0:step2"]
    assert remaining(injections, ()) == injections
    assert remaining(injections, {str(injection) for injection in injections}) == ()
