"""A hang is found wherever it sits: cause, rank and line are right, in time, and the weights are unchanged.

Every run has the defaults and a plain script, `tests/scripts/hangs.py`. One cell runs in `make test`; the
matrix is a campaign, which prints a row for each cell. Run it with two workers at most.
"""

from __future__ import annotations

import pytest
from support.hang_matrix import HANGS, SITUATIONS, Cell, cell, check, launch_words
from support.runs import Runs

REPRESENTATIVE = (cell("evaluation", "queue"),)
MATRIX = [
    *(
        Cell(situation=situation, hang=hang, rank=situation.ranks[number % len(situation.ranks)])
        for hang in HANGS
        for number, situation in enumerate(SITUATIONS)
    ),
    *(cell("callback", how, None) for how in ("sleep", "lock", "regex", "queue", "child")),
    *(cell("reward", how, 0, ranks=1) for how in ("lock", "stop", "child")),
    *(
        cell(place, how, 2, ranks=4)
        for place, how in (("callback", "lock"), ("save", "stop"), ("data", "child"))
    ),
]
"""Every way at every place, each on one of the ranks; all ranks at once, one rank alone, and one of four."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "one",
    [
        *REPRESENTATIVE,
        *(pytest.param(one, marks=pytest.mark.full) for one in MATRIX if one not in REPRESENTATIVE),
    ],
    ids=str,
)
def test_hang_is_found(one: Cell, runs: Runs) -> None:
    """Ways that can be proved, and others, before, in and after training."""
    row = check(one, runs(*launch_words(one)))
    print(row)
    assert row.wrong == (), row
