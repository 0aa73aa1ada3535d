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
    sentence="Rank 1 was killed by SIGKILL in step 8 (phase generate).", signature="signal:9:rank1:step7",
    deterministic=False,
)  # fmt: skip


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_incidents_are_numbered_in_order(tmp_path: Path) -> None:
    """From 1, and after the highest existing number, whatever its cause is."""
    first = close_incident(open_incident(tmp_path), VERDICT, [])
    (tmp_path / "0007-gpu_oom").mkdir()
    second = open_incident(tmp_path)
    assert first.name == "0001-signal"
    assert second.name == "0008-collecting"


def test_an_incomplete_incident_keeps_its_number(tmp_path: Path) -> None:
    """A supervisor that died during collection left a directory; the next incident does not reuse it."""
    left = open_incident(tmp_path)
    assert open_incident(tmp_path).name == "0002-collecting"
    assert left.is_dir()


def test_other_files_in_the_directory_are_ignored(tmp_path: Path) -> None:
    """A user's own files do not affect the next incident."""
    (tmp_path / "notes.txt").write_text("look at 0001")
    assert open_incident(tmp_path).name == "0001-collecting"


def test_an_incident_is_private(tmp_path: Path) -> None:
    """Stacks and messages may contain prompts: modes 0700 and 0600."""
    folder = open_incident(tmp_path)
    assert mode(folder) == 0o700
    assert mode(close_incident(folder, VERDICT, []) / "verdict.json") == 0o600


def test_the_verdict_lists_missing_evidence(tmp_path: Path) -> None:
    """Each gap is one sentence in `verdict.json`."""
    folder = close_incident(open_incident(tmp_path), VERDICT, ["rank 1: gone before its stack was asked for"])
    record = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    assert record == {
        **VERDICT.as_json(),
        "missing_evidence": ["rank 1: gone before its stack was asked for"],
    }


def test_evidence_moves_with_the_directory(tmp_path: Path) -> None:
    """Files collected before the verdict stay in the renamed directory."""
    folder = open_incident(tmp_path)
    (folder / "stacks").mkdir()
    (folder / "stacks" / "rank0.txt").write_text("Thread 0x1")
    assert (close_incident(folder, VERDICT, []) / "stacks" / "rank0.txt").read_text() == "Thread 0x1"


def test_a_message_with_surrogates_is_written(tmp_path: Path) -> None:
    """Decoded tokens and file names may contain lone surrogates."""
    from dataclasses import replace

    folder = close_incident(open_incident(tmp_path), replace(VERDICT, sentence="bad token \udc80"), [])
    assert "bad token" in json.loads((folder / "verdict.json").read_bytes())["sentence"]
