"""Faults as lines on the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_run.dashboards.terminal._incidents import fault_lines
from grpo_run.runtime.history.history import History


def lines(folder: Path, file: str) -> list[str]:
    """The lines of an incident whose verdict names a line of `file`."""
    location = {"file": file, "line": 88, "function": "reward"}
    (folder / "verdict.json").write_text(json.dumps({"location": location}))
    history = History.of(
        [
            {"event": "run_started", "time": 0.0},
            {
                "event": "incident", "cause": "exception", "step": 7, "signature": "x",
                "sentence": "Rank 1 failed.",
                "incident": str(folder),
            },
        ]
    )  # fmt: skip
    return fault_lines(history.recoveries[-1])


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("train.py", "where     train.py:88 in reward"),
        (f"/home/user/{'x' * 60}/rewards/math.py", "where     …/rewards/math.py:88 in reward"),
    ],
)
def test_the_line_of_a_fault_fits_on_a_terminal(tmp_path: Path, file: str, shown: str) -> None:
    """A long path keeps its last folder and its line number; verdict.json has all of it."""
    assert shown in lines(tmp_path, file)
