"""Deadlocks that the ranks' own records prove: named, with rank and line, about a second after they form."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import pytest
from support.deadlocks import PHASES, Row, campaign
from support.runs import Run

KINDS = {
    "mismatch-operation": {"collective_mismatch"},
    "mismatch-shape": {"collective_mismatch"},
    "mismatch-group": {"collective_missing_rank", "collective_mismatch"},
    "skip": {"collective_mismatch", "collective_missing_rank"},
    "exit": {"rank_exited_early"},
    "return": {"rank_exited_early", "collective_mismatch"},
    "kill": {"signal"},
}
"""What each planted deadlock may be called. A skipped call shows as whatever the rank ran into instead."""

DEEDS = {
    "mismatch-operation": "_mismatched_operation",
    "mismatch-shape": "_mismatched_shape",
    "mismatch-group": "_mismatched_group",
    "exit": "_exit",
}
"""The function whose line a verdict must name; a killed rank left none, and one that skipped is somewhere else."""


def check(rows: list[Row]) -> None:
    """Cause, rank and line are right in every one."""
    for row in rows:
        sentence = row.verdict["sentence"]
        assert row.verdict["cause"] in KINDS[row.kind], (row.phase, sentence)
        assert row.verdict["confidence"] == "proved", (row.phase, sentence)
        assert row.names_the_rank, (row.phase, row.rank, sentence)
        location = row.verdict["locations"].get(str(row.rank))
        if row.kind in DEEDS:
            assert location is not None, (row.phase, sentence)
            assert location["function"] == DEEDS[row.kind], (row.phase, sentence)
        if row.kind == "skip":
            assert location is not None, (row.phase, sentence)
            assert location["function"] != "_common", (row.phase, sentence)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.full] if kind in ("return", "mismatch-group") else [])
        for kind in KINDS
    ],
)
def test_a_deadlock_in_any_phase_is_proved(kind: str, runs: Callable[..., Run]) -> None:
    """Two ranks, once in every phase, the culprit now the one and now the other."""
    places = list(zip(itertools.cycle([1, 0]), PHASES))
    _, rows = campaign(runs, kind, ranks=2, places=places, name=kind)
    check(rows)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mismatch-operation", pytest.param("skip", marks=pytest.mark.full)])
def test_with_four_ranks_the_minority_is_named(kind: str, runs: Callable[..., Run]) -> None:
    """Three against one: rank 0 too, which others take for the reference."""
    _, rows = campaign(runs, kind, ranks=4, places=[(0, "reward"), (3, "optimizer")], name=kind)
    check(rows)
    assert all(row.verdict["culprits"] == [row.rank] for row in rows)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_of_twenty_in_every_phase(kind: str, runs: Callable[..., Run]) -> None:
    """Two ranks, twenty times in each phase: all named, each verdict on disk within a second."""
    places = [(1 - index % 2, phase) for phase in PHASES for index in range(20)]
    _, rows = campaign(runs, kind, ranks=2, places=places, name=kind)
    check(rows)
    report(rows)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_of_twenty_with_phases_and_culprits_in_turn(
    kind: str, ranks: int, runs: Callable[..., Run]
) -> None:
    """Twenty faults in one run, so twenty recoveries too."""
    places = [(index % ranks, PHASES[index % len(PHASES)]) for index in range(20)]
    _, rows = campaign(runs, kind, ranks=ranks, places=places, name=kind)
    check(rows)
    report(rows)


def report(rows: list[Row]) -> None:
    """Print the campaign's figures, for docs/campaigns.md; the promise is one second."""
    places: dict[str, list[Row]] = {"all": rows}
    for row in rows:
        places.setdefault(row.phase, []).append(row)
    for place, there in places.items():
        planted = sorted(row.latency_seconds for row in there)
        found = sorted(row.detection_seconds for row in there)
        unsure = sum(1 for row in there if not row.verdict["culprits"])
        print(
            f"| {rows[0].kind} | {place} | {len(there)} | {statistics.median(found):.2f} | {found[-1]:.2f}"
            f" | {statistics.median(planted):.2f} | {planted[-1]:.2f} | {unsure} |"
        )
    assert max(row.detection_seconds for row in rows) <= 1.0
