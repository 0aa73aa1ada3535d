"""All ranks use rank 0's choice; a corrupt checkpoint of this run is renamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files
from support.identities import identity

from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest, write_manifest
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.rank.resuming import choice as agreement
from grpo_run.runtime.rank.resuming.request import RejectedCheckpoint, ResumeChoice, ResumeRequest

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def resume_request(tmp_path: Path) -> ResumeRequest:
    """The first call of run-1 on two ranks."""
    return ResumeRequest(
        call=TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out")),
        run_id="run-1", world_size=2, first_attempt=True, run_started_at=1000.0, script_argument=None,
        resume_from=None,
    )  # fmt: skip


def publish(resume_request: ResumeRequest, step: int) -> Path:
    """Write a checkpoint of the call."""
    path = checkpoint_files.plain(Path(resume_request.call.output_dir), step)
    write_manifest(path, identity(step=step, train_call=resume_request.call, world_size=2))
    return path


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


def test_other_ranks_use_the_choice_of_rank_zero(session: Any, resume_request: ResumeRequest) -> None:
    """They ignore a newer checkpoint; non-ASCII names are transferred correctly."""
    older, _ = publish(resume_request, 5), publish(resume_request, 10)
    choice = ResumeChoice(
        argument=str(older),
        checkpoint=FoundCheckpoint(path=older, manifest=read_manifest(older)),
        notice="é…",
    )
    session.is_main, session.rank, session.votes = False, 1, Votes(choice.to_text(), rank=1)
    assert agreement.agree(session, resume_request) == choice
    assert session.votes.sent[-1] == [1]


def test_rank_zero_sends_its_choice(session: Any, resume_request: ResumeRequest) -> None:
    """It sends the newest verified checkpoint."""
    path = publish(resume_request, 5)
    session.votes = Votes()
    assert agreement.agree(session, resume_request).argument == str(path)
    sent = json.loads(bytes(session.votes.sent[0]))
    assert (sent["argument"], sent["checkpoint"]) == (str(path), str(path))


def test_a_rank_that_cannot_see_the_checkpoint_is_named(
    session: Any, resume_request: ResumeRequest, tmp_path: Path
) -> None:
    """The error is raised on every rank; the usual reason is an `output_dir` on a local disk."""
    publish(resume_request, 5)
    session.votes = Votes(peer_sees=False)
    with pytest.raises(ConfigError, match=r"rank 1 does not see .* shared by all nodes"):
        agreement.agree(session, resume_request)
    missing = ResumeChoice(argument=str(tmp_path / "none"))
    session.is_main, session.rank, session.votes = False, 1, Votes(missing.to_text(), rank=1)
    with pytest.raises(ConfigError, match=r"none does not exist"):
        agreement.agree(session, resume_request)
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
    session: Any, resume_request: ResumeRequest, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrupt checkpoint that cannot be renamed is rejected again at every resume, with a message."""
    older, bad = publish(resume_request, 5), publish(resume_request, 10)
    (bad / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(agreement, "reject_checkpoint", lambda path, reason: None)
    session.votes = Votes()
    assert agreement.agree(session, resume_request).argument == str(older)
    (record,) = events()
    assert (record["moved_to"], record["cause"]) == (None, "checkpoint_corrupt")
    assert "could not be renamed" in session.notified[0]
