"""Incident directories."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.evidence.incident_files import close_incident, open_incident
from grpo_run.watchdog.verdict import Verdict

VERDICT = Verdict(
    cause=Cause.signal, culprits=(1,), step=7, phase="generate", confidence="proved",
    sentence="Rank 1 was killed by SIGKILL; bad token \udc80.", signature="signal:9:rank1:step7",
    deterministic=False,
)  # fmt: skip


def test_incidents_are_numbered_in_order(tmp_path: Path) -> None:
    """From 1, and after the highest existing number, whatever its cause is. A supervisor that died during
    collection left a directory, whose number is not used again; other files do not matter.
    """
    (tmp_path / "notes.txt").write_text("look at 0001")
    assert close_incident(open_incident(tmp_path), VERDICT, []).name == "0001-signal"
    left = open_incident(tmp_path)
    assert open_incident(tmp_path).name == "0003-collecting"
    (tmp_path / "0007-gpu_oom").mkdir()
    assert open_incident(tmp_path).name == "0008-collecting"
    assert left.is_dir()


def test_an_incident_is_private_and_lists_what_is_missing(tmp_path: Path) -> None:
    """Stacks and messages may contain prompts, and decoded tokens lone surrogates. What was collected before
    the verdict moves with the directory.
    """
    folder = open_incident(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "stacks").mkdir()
    (folder / "stacks" / "rank0.txt").write_text("Thread 0x1")
    missing = ["rank 1: gone before its stack was asked for"]
    closed = close_incident(folder, VERDICT, missing)
    assert (closed / "stacks" / "rank0.txt").read_text() == "Thread 0x1"
    assert stat.S_IMODE((closed / "verdict.json").stat().st_mode) == 0o600
    record = json.loads((closed / "verdict.json").read_text(encoding="utf-8"))
    sentence = record.pop("sentence")
    assert sentence.startswith("Rank 1 was killed by SIGKILL; bad token ")
    assert record | {"sentence": VERDICT.sentence} == {**VERDICT.as_json(), "missing_evidence": missing}
