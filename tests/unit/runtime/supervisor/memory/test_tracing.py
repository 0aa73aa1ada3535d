"""Traces after an out-of-memory error: a process of its own, its deadline, and what is remembered. Real
processes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.memory_cases import GRPO, facts

from grpo_run.runtime.memory.files import TRACE_FOLDER, VARIABLE
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.supervisor.memory.tracing import JobTracer
from grpo_run.watchdog.memory.shortage import MemoryPhase

START, HALF = MemoryPlan(), MemoryPlan(micro_batch_divisor=2)
ANSWER = """
import json, os, pathlib
folder = pathlib.Path(os.environ["GRPO_RUN_PLAN_TRACES"])
request = json.loads((folder / "request.json").read_text())
with open(folder.parent / "asked.jsonl", "a") as asked:
    asked.write(json.dumps([plan["micro_batch_divisor"] for plan in request["plans"]]) + "\\n")
with open(folder / "peaks.jsonl", "w") as replies:
    for plan in request["plans"]:
        size = 64.0 / plan["micro_batch_divisor"]
        replies.write(json.dumps({"plan": plan, "peaks": {"backward": size}}) + "\\n")
        replies.flush()
"""


@pytest.fixture
def tracer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a tracer whose process runs the given source."""
    (tmp_path / "run").mkdir()

    def make(source: str, **options: Any) -> JobTracer:
        (tmp_path / "traced_by.py").write_text(f"def main():\n    exec({source!r}, {{}})\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return JobTracer(tmp_path / "run", preloaded=False, entry="traced_by:main", **options)

    return make


def test_peaks_come_from_a_process_and_are_remembered(tracer_of: Any, tmp_path: Path) -> None:
    tracer = tracer_of(ANSWER)
    found = tracer.trace(GRPO, MemoryPhase.backward, [START, HALF])
    assert (found.of(START, MemoryPhase.backward), found.of(HALF, MemoryPhase.backward)) == (64.0, 32.0)
    assert found.missing == ""
    quarter = MemoryPlan(micro_batch_divisor=4)
    found = tracer.trace(GRPO, MemoryPhase.backward, [HALF, quarter])
    assert (found.of(HALF, MemoryPhase.backward), found.of(quarter, MemoryPhase.backward)) == (32.0, 16.0)
    tracer.trace(facts(dropout=True), MemoryPhase.backward, [START, HALF])
    asked = (tmp_path / "run" / "asked.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in asked] == [[1, 2], [4], [1, 2]]
    assert (tmp_path / "run" / TRACE_FOLDER).stat().st_mode & 0o777 == 0o700


def test_a_trace_that_takes_too_long_is_ended_and_what_it_has_found_counts(
    tracer_of: Any, tmp_path: Path
) -> None:
    tracer = tracer_of(f"{ANSWER}\nimport time; time.sleep(60)", seconds=5.0)
    began = time.monotonic()
    found = tracer.trace(GRPO, MemoryPhase.backward, [START, HALF])
    assert time.monotonic() - began < 30
    assert found.missing == "it took more than 5 s"
    assert found.of(HALF, MemoryPhase.backward) == 32.0


def test_a_stop_ends_a_trace(tracer_of: Any) -> None:
    found = tracer_of("import time; time.sleep(60)", interrupted=lambda: True).trace(
        GRPO, MemoryPhase.backward, [START, HALF]
    )
    assert found.missing == "the run is stopped"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit(3)", "the process failed, see"),
        (ANSWER.replace('"backward"', '"score"'), "a trace of this job has no backward"),
        (ANSWER.replace('"plan": plan, "peaks": {"backward": size}', '"refusal": "of why"'), "of why"),
    ],
    ids=["failed", "phase", "refused"],
)
def test_a_trace_without_an_answer_says_why(source: str, words: str, tracer_of: Any) -> None:
    found = tracer_of(source).trace(GRPO, MemoryPhase.backward, [START, HALF])
    assert words in found.missing
    assert found.of(START, MemoryPhase.backward) is None


def test_a_run_directory_that_is_full_or_gone_leaves_no_trace(tmp_path: Path) -> None:
    tracer = JobTracer(tmp_path / "absent", preloaded=False)
    found = tracer.trace(GRPO, MemoryPhase.backward, [START, HALF])
    assert "no process could be started" in found.missing
    assert VARIABLE not in os.environ
