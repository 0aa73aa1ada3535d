"""Warnings that lead to no action: what they say, and that each appears once per attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.supervisor.hang_monitor import warn_of_blind_spots, warn_of_late_ranks
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.late_ranks import LateRank


def late(phase: Phase = Phase.reward, rank: int = 1, seconds: float = 3.0) -> LateRank:
    """A rank that is late."""
    return LateRank(rank=rank, phase=phase, median_seconds=seconds, others_seconds=1.25)


SLOW = late()


@pytest.fixture
def live(tmp_path: Path) -> LiveHistory:
    """The history of a run without events."""
    return LiveHistory(tmp_path / "journal.jsonl", "night")


@pytest.fixture
def shown() -> list[str]:
    """The messages shown to the user."""
    return []


@pytest.fixture
def reporter(live: LiveHistory, shown: list[str]) -> Reporter:
    """A reporter that has not warned of anything."""
    return Reporter(live, "runs/night", shown.append)


@pytest.fixture
def ranks(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The rank of each warning."""
    found: list[int | None] = []
    warn: Callable[[int | None, str], None] = reporter.warn

    def record(rank: int | None, text: str) -> None:
        found.append(rank)
        warn(rank, text)

    monkeypatch.setattr(reporter, "warn", record)
    return found


def test_a_blind_spot_is_reported_with_its_reason(
    reporter: Reporter, shown: list[str], ranks: list[int | None]
) -> None:
    """The warning says that an unobserved rank is not known to be healthy."""
    warn_of_blind_spots({3: "no collective records: refused"}, reporter.warn_once)
    assert ranks == [3]
    (text,) = shown
    assert "rank 3" in text
    assert "no collective records: refused" in text
    assert "unknown, not healthy" in text


def test_a_blind_spot_is_reported_once_per_rank_and_reason(
    reporter: Reporter, ranks: list[int | None]
) -> None:
    """Every poll finds the same one; another reason or another rank is reported."""
    for _ in range(5):
        warn_of_blind_spots({0: "refused"}, reporter.warn_once)
    warn_of_blind_spots({}, reporter.warn_once)
    warn_of_blind_spots({0: "refused"}, reporter.warn_once)
    assert len(ranks) == 1
    warn_of_blind_spots({0: "no answer", 1: "refused"}, reporter.warn_once)
    assert ranks == [0, 0, 1]


def test_a_straggler_is_reported_with_its_times(
    reporter: Reporter, shown: list[str], ranks: list[int | None]
) -> None:
    """The ratio, the phase and the durations."""
    warn_of_late_ranks([SLOW], reporter.warn_once)
    assert ranks == [1]
    assert shown == ["rank 1 takes 2.4 times as long in reward as the others (3.00 s against 1.25 s)"]


def test_a_straggler_is_reported_once_per_phase(reporter: Reporter, ranks: list[int | None]) -> None:
    """Changed durations are not reported again."""
    warn_of_late_ranks([SLOW], reporter.warn_once)
    warn_of_late_ranks([late(seconds=9.0)], reporter.warn_once)
    assert len(ranks) == 1
    others = [SLOW, late(Phase.data), late(rank=0)]
    warn_of_late_ranks(others, reporter.warn_once)
    assert ranks == [1, 1, 0]


def test_a_new_attempt_is_warned_of_again(reporter: Reporter, shown: list[str]) -> None:
    """Its ranks are other processes."""
    for _ in range(2):
        reporter.begin_attempt()
        for _ in range(2):
            warn_of_blind_spots({1: "refused"}, reporter.warn_once)
            warn_of_late_ranks([SLOW], reporter.warn_once)
    assert len(shown) == 4
    assert shown[:2] == shown[2:]


def test_nothing_is_reported_of_healthy_ranks(reporter: Reporter, shown: list[str]) -> None:
    """All ranks are observed and equally fast."""
    warn_of_blind_spots({}, reporter.warn_once)
    warn_of_late_ranks([], reporter.warn_once)
    assert shown == []


def test_a_warning_is_shown_and_counted(reporter: Reporter, live: LiveHistory, shown: list[str]) -> None:
    """It appears on the terminal and in the journal."""
    reporter.warn(1, "x")
    assert shown == ["x"]
    assert live.history.warnings == 1
