"""The trace for Perfetto: lanes of the run and of ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.incidents import write_incident
from support.night import STEP_SECONDS, write_night

from grpo_run.cli.main import main
from grpo_run.dashboards.reports.trace import RUN, STEPS, read_trace


def slices(trace: dict[str, Any], process: int, lane: int) -> list[dict[str, Any]]:
    """The slices of one lane."""
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if (event["pid"], event["tid"]) == (process, lane)]


def test_steps_and_faults_are_where_they_happened(tmp_path: Path) -> None:
    """Steps that are done again have slices of their own."""
    trace = read_trace(write_night(tmp_path, steps=100))
    steps = slices(trace, RUN, STEPS)
    assert len(steps) == 107
    assert steps[0]["ts"] == pytest.approx(6e6)
    assert steps[0]["dur"] == pytest.approx(STEP_SECONDS * 1e6)
    names = [event["name"] for event in trace["traceEvents"]]
    assert {"attempt 0", "attempt 1", "detection: signal", "recovery"} <= set(names)


def test_ranks_have_a_lane_of_phases(tmp_path: Path) -> None:
    """As they were before the incident; the open one ends with it."""
    trace = read_trace(write_incident(tmp_path))
    phases = slices(trace, RUN + 2, 1)
    assert {"generate", "reward"} <= {one["name"] for one in phases}
    last = phases[-1]
    assert last["args"] == {"open": True}
    fault = next(one for one in trace["traceEvents"] if one["name"].startswith("detection"))
    assert last["ts"] + last["dur"] == pytest.approx(fault["ts"] + fault["dur"], abs=2)


def test_the_file_is_compressed_if_its_name_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default into the run's directory."""
    monkeypatch.chdir(tmp_path)
    write_night(tmp_path, steps=60)
    assert main(["trace", "night"]) == 0
    packed = gzip.decompress(Path(capsys.readouterr().out.strip()).read_bytes())
    assert main(["trace", "night", "--output", "trace.json"]) == 0
    assert packed == Path("trace.json").read_bytes()
    assert json.loads(packed)["traceEvents"]
