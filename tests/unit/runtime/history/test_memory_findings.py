"""Findings of several ranks and attempts are one finding, said once."""

from __future__ import annotations

import json
from typing import Any

from support.journal import as_event

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.memory_findings import WAITED_SECONDS, FindingLines, MemoryFindings


def found(rank: int = 0, attempt: int = 0, at: float = 100.0, **fields: Any) -> dict[str, Any]:
    """The record of a list that keeps tensors."""
    return {
        "event": "memory_finding", "time": at, "rank": rank, "attempt": attempt, "step": 7, "world_size": 2,
        "key": "growth|list|a.py|3",
        "subject": "held by list `a` (a.py:3)", "sentence": "5 tensors, held by list `a` (a.py:3)",
        "kind": "growth", "tensors": 5,
        **fields,
    }  # fmt: skip


def snapshot(**fields: Any) -> dict[str, Any]:
    """The record of a file for the viewer."""
    return {
        "event": "memory_snapshot", "time": 101.0, "rank": 1, "attempt": 0, "step": 8,
        "path": "memory_trace/rank-1.pickle",
        "reason": "finding", "bytes": 2048, "entries": 9, **fields,
    }  # fmt: skip


def test_a_finding_waits_for_the_other_ranks_and_names_all_of_them() -> None:
    """Once all have it, or after some seconds; a rank that finds it later is one short line."""
    findings, lines = MemoryFindings(), FindingLines()
    findings.apply_found(as_event(found(rank=1)))
    assert lines.new(findings, ranks=[0, 1], now=100.1) == []
    findings.apply_found(as_event(found(rank=0, at=100.2, sentence="6 tensors")))
    assert lines.new(findings, ranks=[0, 1], now=100.3) == [
        "memory: ranks 0 and 1: 5 tensors, held by list `a` (a.py:3)"
    ]
    findings.apply_found(as_event(found(rank=1, key="other", subject="held by dict `b`", at=101.0)))
    assert lines.new(findings, ranks=[0, 1], now=101.0 + WAITED_SECONDS)[0].startswith("memory: rank 1: ")
    findings.apply_found(as_event(found(rank=0, key="other", at=140.0)))
    assert lines.new(findings, ranks=[0, 1], now=140.0) == ["memory: rank 0 too: held by dict `b`"]
    assert lines.new(findings, ranks=[0, 1], now=999.0, final=True) == []


def test_a_finding_is_said_at_the_end_without_waiting() -> None:
    """Its run may end within the seconds that other ranks are waited for."""
    findings = MemoryFindings()
    findings.apply_found(as_event(found(world_size=1)))
    assert FindingLines().new(findings, ranks=[0, 1], now=100.0) == []
    assert FindingLines().new(findings, ranks=[0, 1], now=100.0, final=True) == [
        "memory: 5 tensors, held by list `a` (a.py:3)"
    ]


def test_a_finding_is_not_said_again_after_a_restart_of_ranks_or_supervisor() -> None:
    """The number of attempts is shown by `status` and reports."""
    history, lines = History(), FindingLines()
    for attempt in (0, 2):
        history.apply(as_event(found(attempt=attempt)))
        history.apply(as_event(found(rank=1, attempt=attempt)))
        said = lines.new(history.memory_trace, ranks=[0, 1], now=101.0)
        assert len(said) == (attempt == 0)
    (line,) = history.memory_trace.lines()
    assert line == "ranks 0 and 1: 5 tensors, held by list `a` (a.py:3) (found in 2 attempts)"
    restarted = FindingLines()
    restarted.skip(history.memory_trace)
    history.apply(as_event(found(attempt=3, at=200.0)))
    assert restarted.new(history.memory_trace, ranks=[0, 1], now=300.0, final=True) == []


def test_a_snapshot_is_said_once_with_what_opens_it() -> None:
    """The newest of a path counts."""
    history, lines = History(), FindingLines()
    history.apply(as_event(snapshot()))
    (line,) = lines.new(history.memory_trace, ranks=[0, 1], now=101.0)
    assert line == (
        "memory: allocator history saved, memory_trace/rank-1.pickle (finding, step 8, 2.0 KiB);"
        " open it with https://docs.pytorch.org/memory_viz"
    )
    history.apply(as_event(snapshot(reason="end of the script", step=20, bytes=4096)))
    assert lines.new(history.memory_trace, ranks=[0, 1], now=102.0, final=True) == []
    assert history.memory_trace.lines() == [
        "allocator history: memory_trace/rank-1.pickle (end of the script, step 20, 4.0 KiB), opened by https://docs.pytorch.org/memory_viz"
    ]


def test_findings_are_json_with_ranks_and_attempts() -> None:
    """Nothing of the record's frame is repeated; a record of another version is counted as unreadable."""
    history = History()
    history.apply(as_event(found()))
    history.apply(
        as_event({"event": "memory_finding", "time": 1.0, "rank": 0, "attempt": 0, "sentence": "no key"})
    )
    assert history.unreadable == 1
    assert json.loads(json.dumps(history.memory_trace.as_json()))["findings"] == [
        {"kind": "growth", "tensors": 5, "sentence": "5 tensors, held by list `a` (a.py:3)", "ranks": [0],
        "attempts": [0], "bytes": 0, "shape": [], "dtype": "", "since_step": 0, "steps": 0, "made_at": None,
        "holder": None, "held_at": None, "details": {}}
    ]  # fmt: skip


def test_what_merely_grows_is_listed_and_not_said() -> None:
    """The status has it; once it will not fit, it is another finding, which is said."""
    findings, lines = MemoryFindings(), FindingLines()
    findings.apply_found(
        as_event(found(key="growing|list|a.py|3", kind="growing", sentence="still growing: 5 tensors"))
    )
    assert lines.new(findings, ranks=[0], now=200.0, final=True) == []
    assert findings.lines() == ["rank 0: still growing: 5 tensors"]
    findings.apply_found(as_event(found()))
    assert len(lines.new(findings, ranks=[0], now=200.0, final=True)) == 1
