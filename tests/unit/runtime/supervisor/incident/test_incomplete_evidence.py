"""No error while evidence is collected prevents a verdict."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.incident_scene import Scene, exited

from grpo_run.runtime.supervisor import incident
from grpo_run.runtime.supervisor.incident import journal_tail
from grpo_run.watchdog.causes import Cause


def test_the_tail_of_an_unreadable_journal_is_empty(tmp_path: Path) -> None:
    """The investigation continues."""
    assert journal_tail(tmp_path / "missing") == []


def test_only_the_end_of_a_large_journal_is_read(tmp_path: Path) -> None:
    """Journals grow to megabytes; invalid UTF-8 is replaced."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 3_000_000 + b"\n\xff\n{}\n")
    lines = journal_tail(path)
    assert lines[-2:] == ["\ufffd\n", "{}\n"]
    assert sum(map(len, lines)) <= 256 * 1024


def test_a_folder_that_cannot_be_created_does_not_prevent_a_verdict(scene: Scene) -> None:
    """It is named in the missing evidence."""
    scene.run.incidents.rmdir()
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.cause is Cause.signal
    assert outcome.folder == scene.run.incidents
    assert "evidence could not be written" in outcome.missing[0]


def test_a_disk_that_becomes_full_is_named_in_the_missing_evidence(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps still happen, and the verdict is returned."""

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(incident.collection, "collect", full)
    monkeypatch.setattr(incident.incident_files, "close_incident", full)
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.culprits == (1,)
    assert [text.partition(":")[0] for text in outcome.missing] == [
        "evidence could not be written",
        "the verdict could not be written",
    ]


class UnexpectedError(Exception):
    """An error that no code expects."""


def test_any_error_while_collecting_evidence_does_not_prevent_a_verdict(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of the error is named."""

    def fail(*args: Any, **options: Any) -> Any:
        raise UnexpectedError("odd")

    monkeypatch.setattr(incident.collection, "collect", fail)
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.culprits == (1,)
    assert "evidence could not be written: UnexpectedError: odd" in outcome.missing


@pytest.mark.parametrize("evidence_fails", [False, True])
def test_records_that_cannot_be_read_are_named_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, evidence_fails: bool
) -> None:
    """Whether or not later steps fail; the verdict is made without them."""

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(scene.watch, "positions", fail)
    if evidence_fails:
        monkeypatch.setattr(incident.collection, "collect", fail)
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.cause is Cause.signal
    told = [line for line in outcome.missing if line.startswith("collective records could not be read")]
    assert told == ["collective records could not be read: [Errno 24] Too many open files"]
