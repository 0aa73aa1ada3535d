"""Consensus functions on real ranks: they agree, and ranks that disagree are named, also outside `grpo-run launch`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Run

SCRIPT = SCRIPTS / "consensus.py"
SLOWEST_SECONDS = 5.0
"""One second is promised on a machine that has nothing else to do."""


def line_of(text: str, nth: int = 1) -> int:
    """Return the number of the nth line of the script that is `text`, without its indentation."""
    lines = [number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.strip() == text]
    return lines[nth - 1]


def answers(folder: Path, rank: int) -> dict[str, Any]:
    """Return what a rank has written down."""
    read: dict[str, Any] = json.loads((folder / f"answers{rank}.json").read_text())
    return read


@pytest.mark.parametrize("launcher", ["grpo-run", "plain"])
def test_ranks_decide_together_and_disagreements_are_raised_on_every_rank(
    launcher: str, runs: Callable[..., Run], tmp_path: Path
) -> None:
    """All ranks take as many rounds as the slowest. Other lines, functions and counts raise, and name both sites."""
    if launcher == "grpo-run":
        run = runs("--nproc-per-node", "2", str(SCRIPT)).start()
        assert run.wait() == 0, run.tail()
    else:
        plain_ranks(tmp_path, [str(SCRIPT)], ranks=2)
    first, second = answers(tmp_path, 0), answers(tmp_path, 1)
    assert first.pop("agreed") == [7, -4, True, False, False, True]
    assert second.pop("agreed") == [7, 0, True, False, False, True]
    expected = {
        "other_line": [
            f"rank 0 is in consensus.any at consensus.py:{line_of('consensus.any(True)')} in other_line",
            f"rank 1 is in consensus.any at consensus.py:{line_of('consensus.any(True)', 2)} in other_line",
        ],
        "other_function": ["rank 0 is in consensus.all", "rank 1 is in consensus.any", "in other_function"],
        "other_count": [
            f"rank 0 is in consensus.any at consensus.py:{line_of('consensus.any(False)')} in other_count (call ",
            f"rank 1 is in consensus.all at consensus.py:{line_of('consensus.all(True)')} in other_count (call ",
        ],
        "other_iteration": ["(iteration 1, call ", "(iteration 3, call ", "in other_iteration"],
    }
    for name, parts in expected.items():
        (message, at), (other_message, other_at) = first[name], second[name]
        assert message == other_message
        assert [part for part in parts if part not in message] == [], message
        assert abs(at - other_at) < SLOWEST_SECONDS
