"""What a person is told: everything once an attempt, and nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_run.runtime.supervision.notices import Notices
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.detection import Straggler

SLOW = Straggler(rank=1, phase=Phase.reward, median_seconds=3.0, others_seconds=1.25)


@pytest.fixture
def said() -> list[tuple[int, str]]:
    """What was said, and of whom."""
    return []


@pytest.fixture
def notices(said: list[tuple[int, str]]) -> Notices:
    """Nothing was said yet."""
    return Notices(lambda rank, text: said.append((rank, text)))


def test_what_cannot_be_seen_is_said_with_its_reason(notices: Notices, said: list[tuple[int, str]]) -> None:
    """And that it is not a rank in good health."""
    notices.blindness({3: "no collective records: refused"})
    ((rank, text),) = said
    assert rank == 3
    assert "rank 3" in text
    assert "no collective records: refused" in text
    assert "unknown, not healthy" in text


def test_blindness_is_said_once_a_rank_and_reason(notices: Notices, said: list[tuple[int, str]]) -> None:
    """At every look it is the same; another reason is news, and so is another rank."""
    for _ in range(5):
        notices.blindness({0: "refused"})
    notices.blindness({})
    notices.blindness({0: "refused"})
    assert len(said) == 1
    notices.blindness({0: "no answer", 1: "refused"})
    assert [rank for rank, _ in said] == [0, 0, 1]


def test_a_straggler_is_said_in_numbers(notices: Notices, said: list[tuple[int, str]]) -> None:
    """How much slower, in what, and the times themselves."""
    notices.stragglers([SLOW])
    assert said == [(1, "rank 1 takes 2.4 times as long in reward as the others (3.00 s against 1.25 s)")]


def test_a_straggler_is_said_once_a_phase(notices: Notices, said: list[tuple[int, str]]) -> None:
    """Its times change all the time, which is no news."""
    notices.stragglers([SLOW])
    notices.stragglers([replace(SLOW, median_seconds=9.0)])
    assert len(said) == 1
    notices.stragglers([SLOW, replace(SLOW, phase=Phase.data), replace(SLOW, rank=0)])
    assert [rank for rank, _ in said] == [1, 1, 0]


def test_a_new_attempt_is_told_anew(notices: Notices, said: list[tuple[int, str]]) -> None:
    """Its ranks are other processes."""
    for _ in range(2):
        notices.begin_attempt()
        notices.blindness({1: "refused"})
        notices.stragglers([SLOW])
        notices.blindness({1: "refused"})
        notices.stragglers([SLOW])
    assert len(said) == 4
    assert said[:2] == said[2:]


def test_of_nothing_nothing_is_said(notices: Notices, said: list[tuple[int, str]]) -> None:
    """All ranks are seen and as fast as each other."""
    notices.blindness({})
    notices.stragglers([])
    assert said == []
