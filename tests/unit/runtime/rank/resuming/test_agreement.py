"""All ranks use rank 0's choice; a corrupt checkpoint of this run is renamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files
from support.builders.runtime.resume_shell import ResumeShell

from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.publishing import reject_checkpoint
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.runtime.rank.resuming import choice as agreement
from grpo_run.runtime.rank.resuming.request import RejectedCheckpoint, ResumeChoice, ResumeRequest

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResumeShell:
    """A run with a complete checkpoint."""
    shell = ResumeShell(tmp_path, monkeypatch)
    shell.save("5")
    return shell


class Votes:
    """A vote group of two ranks that records this rank's values and answers for its peer."""

    def __init__(self, text: str = "", *, peer_sees: bool = True, rank: int = 0) -> None:
        self.text, self.peer_sees, self.rank = text.encode(), peer_sees, rank
        self.sent: list[list[int]] = []

    def maximum(self, value: int) -> int:
        """Return the length of the longer text."""
        return max(value, len(self.text))

    def gather(self, values: list[int]) -> list[list[int]]:
        """The first call exchanges texts, the second whether the checkpoint is visible."""
        self.sent.append(values)
        peer = list(self.text.ljust(len(values))) if len(self.sent) == 1 else [int(self.peer_sees)]
        return [values, peer] if self.rank == 0 else [peer, values]


def test_other_ranks_use_the_choice_of_rank_zero(session: Any, run: ResumeShell) -> None:
    """They ignore a newer checkpoint; non-ASCII names are transferred correctly."""
    run.save("10")
    older = run.output / "checkpoint-5"
    choice = ResumeChoice(
        argument=str(older),
        checkpoint=FoundCheckpoint(path=older, manifest=read_manifest(older)),
        notice="é…",
    )
    session.is_main, session.rank, session.votes = False, 1, Votes(choice.to_text(), rank=1)
    assert agreement.agree(session, run.request) == choice
    assert session.votes.sent[-1] == [1]


def test_rank_zero_sends_its_choice(session: Any, run: ResumeShell) -> None:
    """It sends the newest verified checkpoint."""
    path = run.output / "checkpoint-5"
    session.votes = Votes()
    assert agreement.agree(session, run.request).argument == str(path)
    sent = json.loads(bytes(session.votes.sent[0]))
    assert (sent["argument"], sent["checkpoint"]) == (str(path), str(path))


def test_a_rank_that_cannot_see_the_checkpoint_is_named(
    session: Any, run: ResumeShell, tmp_path: Path
) -> None:
    """The error is raised on every rank; the usual reason is an `output_dir` on a local disk."""
    session.votes = Votes(peer_sees=False)
    with pytest.raises(ConfigError, match=r"rank 1 does not see .* shared by all nodes"):
        agreement.agree(session, run.request)
    missing = ResumeChoice(argument=str(tmp_path / "none"))
    session.is_main, session.rank, session.votes = False, 1, Votes(missing.to_text(), rank=1)
    with pytest.raises(ConfigError, match=r"none does not exist"):
        agreement.agree(session, run.request)
    assert session.votes.sent[-1] == [0]


def test_only_a_corrupt_checkpoint_of_this_run_is_renamed(
    session: Any, tmp_path: Path, events: Events
) -> None:
    """Every rejection is journaled and printed with its reason."""
    fields: dict[str, Any] = {"step": 5, "reason": "it is bad"}
    for name, corrupt, own in (("a", True, True), ("b", True, False), ("c", False, True)):
        path = checkpoint_files.plain(tmp_path / name, 5)
        agreement.reject(session, RejectedCheckpoint(path=path, corrupt=corrupt, own=own, **fields))
    assert [(tmp_path / name / "checkpoint-5").exists() for name in "abc"] == [False, True, True]
    records = events()
    assert [record["event"] for record in records] == ["checkpoint_rejected"] * 3
    assert [record.get("cause") for record in records] == ["checkpoint_corrupt", "checkpoint_corrupt", None]
    assert records[0]["moved_to"] == str(tmp_path / "a" / "rejected-checkpoint-5")
    assert "renamed to rejected-checkpoint-5" in session.notified[0]


def test_a_read_only_file_system_does_not_fail_the_resume(
    session: Any, run: ResumeShell, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrupt checkpoint that cannot be renamed is rejected again at every resume, with a message."""
    run.save("10")
    run.damage("out/checkpoint-10")
    monkeypatch.setattr(agreement, "reject_checkpoint", lambda path, reason, fence: None)
    session.votes = Votes()
    assert agreement.agree(session, run.request).argument == str(run.output / "checkpoint-5")
    (record,) = events()
    assert (record["moved_to"], record["cause"]) == (None, "checkpoint_corrupt")
    assert "could not be renamed" in session.notified[0]


def test_a_serialized_choice_is_equal_on_another_rank(run: ResumeShell, tmp_path: Path) -> None:
    """A rank that cannot see the checkpoint raises CheckpointError."""

    def ask(request: ResumeRequest) -> ResumeChoice:
        return agreement.choose(request, lambda rejected: None)

    run.save("10", "finished")
    for choice in (ask(run.request), ask(replace(run.request, run_id="run-9")), ResumeChoice(argument=None)):
        assert ResumeChoice.from_text(choice.to_text(), run.request) == choice
    from_script = ResumeChoice.from_text(
        ResumeChoice(argument="a", from_script=True).to_text(), replace(run.request, script_argument="b")
    )
    assert from_script.argument == "b"
    text = ask(run.request).to_text()
    reject_checkpoint(Path(ask(run.request).argument), "gone")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        ResumeChoice.from_text(text, run.request)
    with pytest.raises(CheckpointError):
        ResumeChoice.from_text(ResumeChoice(argument=str(tmp_path / "none")).to_text(), run.request)
