"""Deadlocks proved from the ranks' collective records are reported with rank and line within about a
second.
"""

from __future__ import annotations

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
@pytest.mark.parametrize(
    "first_kind", [0, *(pytest.param(kind, marks=pytest.mark.full) for kind in range(1, 6))]
)
def test_deadlocks_of_every_kind_and_phase_are_proved(first_kind: int, runs: Runs) -> None:
    """Each run has one fault in every phase, on alternating ranks.

    The first run has all kinds; together, every kind in every phase, found within a second.
    """
    kinds = list(KINDS)
    faults = [
        Deadlock(kind=kinds[(first_kind + index) % len(kinds)], rank=1 - index % 2, phase=phase)
        for index, phase in enumerate(PHASES)
    ]
    rows = campaign(runs, faults, ranks=2, name=f"mixed-{first_kind}")
    check(rows)
    # the short form runs beside other tests
    assert not first_kind or max(row.detection_seconds for row in rows) <= 1.0


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mismatch-operation", "skip"])
def test_minority_of_four_ranks_is_named(kind: str, runs: Runs) -> None:
    """Three ranks agree against one; the one is also found when it is rank 0."""
    faults = [Deadlock(kind=kind, rank=0, phase="reward"), Deadlock(kind=kind, rank=3, phase="optimizer")]
    rows = campaign(runs, faults, ranks=4, name=kind)
    check(rows)
    assert all(row.verdict["culprits"] == [row.rank] for row in rows)
