"""A hang is found wherever it sits: cause, rank and line are right, in time, and the weights are unchanged.

Every run has the defaults and a plain script, `tests/scripts/hangs.py`. A few cells run in `make test`; the
matrix is a campaign. Its rows are appended to `build/hang_matrix.jsonl`, from which
`python -m support.hang_matrix` prints the table. Run it with two workers at most.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hang_matrix import BESIDE_WORKERS, HANGS, SITUATIONS, Cell, cell, check, launch_words
from support.result_rows import append
from support.runs import Runs

ROWS = Path(__file__).parents[2] / "build" / "hang_matrix.jsonl"
REPRESENTATIVE = (
    cell("callback", "lock"), cell("startup", "sleep"), cell("evaluation", "queue"),
    cell("exit-handler", "join"),
)  # fmt: skip
MATRIX = [
    Cell(situation=situation, hang=hang, rank=rank)
    for hang in HANGS
    for number, situation in enumerate(SITUATIONS)
    for rank in situation.ranks
    if hang.in_table or rank == situation.ranks[number % len(situation.ranks)]
]
"""The ways of the table on both ranks, the further ones on one rank for each situation."""
OTHERS = [
    *(cell("callback", how, None) for how in ("sleep", "lock", "regex", "queue", "child")),
    *(cell("startup", how, None) for how in ("lock", "child")),
    *(cell("reward", how, 0, ranks=1) for how in ("sleep", "lock", "stop", "regex", "queue", "child")),
    *(cell(place, "lock", 0, ranks=1) for place in ("startup", "evaluation", "exit-handler", "thread")),
    *(Cell(situation=BESIDE_WORKERS, hang=hang, rank=1) for hang in HANGS if hang.says),
    *(
        cell(place, how, 2, ranks=4)
        for place, how in (("callback", "lock"), ("save", "stop"), ("data", "child"))
    ),
]
"""All ranks at once, one rank alone, beside workers of a data loader, and one of four."""


def prove(one: Cell, runs: Runs) -> None:
    """Run a cell, keep its row, and fail if anything is wrong with it."""
    row = check(one, runs(*launch_words(one)))
    append(row, ROWS)
    assert row.wrong == (), row


@pytest.mark.timeout(200)
@pytest.mark.parametrize("one", REPRESENTATIVE, ids=str)
def test_hang_is_found(one: Cell, runs: Runs) -> None:
    """Ways that can be proved, before, in and after training."""
    prove(one, runs)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("one", [*MATRIX, *OTHERS], ids=str)
def test_the_matrix_of_hangs(one: Cell, runs: Runs) -> None:
    """Every situation and way to hang."""
    prove(one, runs)
