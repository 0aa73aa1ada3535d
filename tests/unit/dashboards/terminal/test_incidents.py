"""The words of a fault, of the ranks beside the culprit, and of a recovery."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.builders.screen import fault

from grpo_run.dashboards.terminal._incidents import fault_lines, inspection_line, recovered_line
from grpo_run.runtime.files import short_path


def test_paths_are_short_inside_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths elsewhere are absolute."""
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "x") == "runs/x"
    assert short_path("/elsewhere/x") == "/elsewhere/x"
    assert "in runs/x/incidents/1; " in inspection_line(
        fault(incident=str(tmp_path / "runs/x/incidents/1")), tmp_path
    )


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_fault_without_a_readable_verdict_is_still_shown(tmp_path: Path, content: str | None) -> None:
    """A full disk takes no evidence."""
    if content is not None:
        (tmp_path / "verdict.json").write_text(content)
    lines = fault_lines(fault(incident=str(tmp_path)))
    assert lines[0].startswith("Rank 1 was killed")
    assert not any(line.startswith(("where", "waiting")) for line in lines)


@pytest.mark.parametrize(
    ("fields", "others", "waiting"),
    [
        ({"lost_connection": (0,)}, "rank 0 lost its connection to rank 1", "ranks 2 and 3"),
        ({"lost_connection": (0, 2, 3)}, "ranks 0, 2 and 3 lost their connection to rank 1", None),
        ({"also_failed": (2,)}, "rank 2 failed too", "ranks 0 and 3"),
        (
            {"also_failed": (0,), "lost_connection": (2, 3)},
            "rank 0 failed too; ranks 2 and 3 lost their connection to rank 1",
            None,
        ),
        ({"lost_connection": (0, 1, 2, 3), "rank": None}, None, None),
    ],
)
def test_the_other_ranks_that_failed_are_one_line(
    tmp_path: Path, fields: dict[str, Any], others: str | None, waiting: str | None
) -> None:
    """They are not said to wait."""
    (tmp_path / "verdict.json").write_text(json.dumps({"waiters": [0, 2, 3]}))
    facts = dict(line.split(maxsplit=1) for line in fault_lines(fault(incident=str(tmp_path), **fields))[1:])
    assert (facts.get("others"), facts.get("waiting")) == (others, waiting)


def test_a_recovery_to_the_first_step_says_so() -> None:
    """Without a checkpoint, training repeats every step."""
    line = recovered_line(fault(seconds=1.0, from_checkpoint=0, lost_steps=1))
    assert line == "training continues 1.00 s after the fault, resumed from step 0, 1 step repeated"


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("train.py", "where     train.py:88 in reward"),
        (f"/home/user/{'x' * 60}/rewards/math.py", "where     …/rewards/math.py:88 in reward"),
    ],
)
def test_the_line_of_a_fault_fits_on_a_terminal(tmp_path: Path, file: str, shown: str) -> None:
    """A long path keeps its last folder and its line number; verdict.json has all of it."""
    location = {"file": file, "line": 88, "function": "reward"}
    (tmp_path / "verdict.json").write_text(json.dumps({"location": location}))
    assert shown in fault_lines(fault(incident=str(tmp_path)))
