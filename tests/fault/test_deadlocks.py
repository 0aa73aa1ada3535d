"""Deadlocks proved from the ranks' collective records are reported with rank and line within about a
second.
"""

from __future__ import annotations

import statistics

import pytest
from support.deadlocks import PHASES, Deadlock, Row, campaign
from support.runs import Runs

KINDS = {
    "mismatch-operation": {"collective_mismatch"},
    "mismatch-shape": {"collective_mismatch"},
    "skip": {"collective_mismatch", "collective_missing_rank"},
    "exit": {"rank_exited_early"},
    "return": {"rank_exited_early", "collective_mismatch", "collective_missing_rank"},
    "kill": {"signal"},
}
"""Acceptable causes for each injected fault. A skipped call appears as the next collective that the rank
joins."""

FAULT_FUNCTIONS = {
    "mismatch-operation": "_mismatched_operation",
    "mismatch-shape": "_mismatched_shape",
    "exit": "_exit",
}
"""The function that the verdict's location must name. A killed rank has no location; a rank that skipped is
elsewhere."""


def check(rows: list[Row]) -> None:
    """Check cause, confidence, rank and location of every row."""
    for row in rows:
        sentence = row.verdict["sentence"]
        assert row.verdict["cause"] in KINDS[row.kind], (row.phase, sentence)
        assert row.verdict["confidence"] == "proved", (row.phase, sentence)
        assert row.names_the_rank, (row.phase, row.rank, sentence)
        location = row.verdict["locations"].get(str(row.rank))
        if row.kind in FAULT_FUNCTIONS:
            assert location is not None, (row.phase, sentence)
            assert location["function"] == FAULT_FUNCTIONS[row.kind], (row.phase, sentence)
        if row.kind == "skip":
            assert location is not None, (row.phase, sentence)
            assert location["function"] != "common_collective", (row.phase, sentence)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first_kind", [0, *(pytest.param(kind, marks=pytest.mark.full) for kind in (2, 5))])
def test_deadlocks_of_every_kind_and_phase_are_proved(first_kind: int, runs: Runs) -> None:
    """Each run has one fault in every phase.

    Together, different kinds in each phase, on alternating ranks; the first run has all kinds.
    """
    kinds = list(KINDS)
    faults = [
        Deadlock(kind=kinds[(first_kind + index) % len(kinds)], rank=1 - index % 2, phase=phase)
        for index, phase in enumerate(PHASES)
    ]
    check(campaign(runs, faults, ranks=2, name=f"mixed-{first_kind}"))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mismatch-operation", "skip"])
def test_minority_of_four_ranks_is_named(kind: str, runs: Runs) -> None:
    """Three ranks agree against one; the one is also found when it is rank 0."""
    faults = [Deadlock(kind=kind, rank=0, phase="reward"), Deadlock(kind=kind, rank=3, phase="optimizer")]
    rows = campaign(runs, faults, ranks=4, name=kind)
    check(rows)
    assert all(row.verdict["culprits"] == [row.rank] for row in rows)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_of_twenty_in_every_phase(kind: str, runs: Runs) -> None:
    """With twenty faults per phase, every culprit is named and every verdict is on disk within a second."""
    faults = [Deadlock(kind=kind, rank=1 - index % 2, phase=phase) for phase in PHASES for index in range(20)]
    rows = campaign(runs, faults, ranks=2, name=kind)
    check(rows)
    report(rows)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_of_twenty_with_rotating_phases_and_culprits(kind: str, ranks: int, runs: Runs) -> None:
    """Twenty faults in one run cause twenty recoveries."""
    faults = [
        Deadlock(kind=kind, rank=index % ranks, phase=PHASES[index % len(PHASES)]) for index in range(20)
    ]
    rows = campaign(runs, faults, ranks=ranks, name=kind)
    check(rows)
    report(rows)


def report(rows: list[Row]) -> None:
    """Print the rows of docs/reference/campaigns.md; the promised latency is one second."""
    places: dict[str, list[Row]] = {"all": rows}
    for row in rows:
        places.setdefault(row.phase, []).append(row)
    for place, there in places.items():
        injected = sorted(row.latency_seconds for row in there)
        found = sorted(row.detection_seconds for row in there)
        unsure = sum(1 for row in there if not row.verdict["culprits"])
        print(
            f"| {rows[0].kind} | {place} | {len(there)} | {statistics.median(found):.2f} | {found[-1]:.2f}"
            f" | {statistics.median(injected):.2f} | {injected[-1]:.2f} | {unsure} |"
        )
    assert max(row.detection_seconds for row in rows) <= 1.0
