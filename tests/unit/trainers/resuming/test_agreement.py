"""Rank 0's choice is every rank's, and a bad checkpoint is renamed aside once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files as made
from support.identities import identity

from grpo_run.runtime.checkpoints import manifest, publishing
from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.resuming import agreement
from grpo_run.trainers.resuming.choice import PassedOver, Question, Resume

Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def question(tmp_path: Path) -> Question:
    """The first call of run-1, on two ranks."""
    return Question(
        call=TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out")),
        run_id="run-1", world_size=2, first_attempt=True, run_started_at=1000.0, script_asks=None, resume_from=None,
    )  # fmt: skip


def publish(question: Question, step: int) -> Path:
    """One of its checkpoints."""
    path = made.plain(Path(question.call.output_dir), step)
    manifest.write_manifest(path, identity(step=step, train_call=question.call, world_size=2))
    return path


class Votes:
    """A group of two: what this rank brings is noted, what its peer brings is given."""

    def __init__(self, text: str = "", *, peer_sees: bool = True, rank: int = 0) -> None:
        self.text, self.peer_sees, self.rank = text.encode(), peer_sees, rank
        self.brought: list[list[int]] = []

    def maximum(self, value: int) -> int:
        """The longer text."""
        return max(value, len(self.text))

    def gather(self, values: list[int]) -> list[list[int]]:
        """Texts first, then who sees it."""
        self.brought.append(values)
        peer = list(self.text.ljust(len(values))) if len(self.brought) == 1 else [int(self.peer_sees)]
        return [values, peer] if self.rank == 0 else [peer, values]


def test_other_ranks_take_what_rank_0_tells(session: Any, question: Question) -> None:
    """Though another is newer here; names that are no ASCII arrive whole."""
    older, _ = publish(question, 5), publish(question, 10)
    choice = Resume(
        argument=str(older),
        own=manifest.FoundCheckpoint(path=older, manifest=manifest.read_manifest(older)),
        notice="é…",
    )
    session.is_main, session.rank, session.votes = False, 1, Votes(choice.to_text(), rank=1)
    assert agreement.agree(session, question) == choice
    assert session.votes.brought[-1] == [1]


def test_rank_0_tells_what_it_chose(session: Any, question: Question) -> None:
    """The newest intact one."""
    path = publish(question, 5)
    session.votes = Votes()
    assert agreement.agree(session, question).argument == str(path)
    told = json.loads(bytes(session.votes.brought[0]))
    assert (told["argument"], told["own"]) == (str(path), str(path))


def test_a_rank_that_cannot_see_it_is_named(session: Any, question: Question, tmp_path: Path) -> None:
    """On every rank: an output directory on a node's own disk is the usual reason."""
    publish(question, 5)
    session.votes = Votes(peer_sees=False)
    with pytest.raises(ConfigError, match=r"rank 1 does not see .* all nodes share"):
        agreement.agree(session, question)
    gone = Resume(argument=str(tmp_path / "none"))
    session.is_main, session.rank, session.votes = False, 1, Votes(gone.to_text(), rank=1)
    with pytest.raises(ConfigError, match=r"none is not there"):
        agreement.agree(session, question)
    assert session.votes.brought[-1] == [0]


def test_ours_is_renamed_and_anothers_is_left(session: Any, tmp_path: Path, events: Events) -> None:
    """Only what its bytes prove bad; each is journaled with the reason, and said."""
    fields: dict[str, Any] = {"step": 5, "reason": "it is bad"}
    for name, corrupt, ours in (("a", True, True), ("b", True, False), ("c", False, True)):
        path = made.plain(tmp_path / name, 5)
        agreement.pass_over(session, PassedOver(path=path, corrupt=corrupt, ours=ours, **fields))
    assert [(tmp_path / name / "checkpoint-5").exists() for name in "abc"] == [False, True, True]
    records = events()
    assert [record["event"] for record in records] == ["checkpoint_rejected"] * 3
    assert [record.get("cause") for record in records] == ["checkpoint_corrupt", "checkpoint_corrupt", None]
    assert records[0]["moved_to"] == str(tmp_path / "a" / "rejected-checkpoint-5")
    assert "kept as rejected-checkpoint-5" in session.said[0]


def test_a_read_only_file_system_does_not_fail_the_resume(
    session: Any, question: Question, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad one is passed over where it is, at every resume anew, and that is said."""
    older, bad = publish(question, 5), publish(question, 10)
    (bad / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(publishing, "reject", lambda path, reason: None)
    session.votes = Votes()
    assert agreement.agree(session, question).argument == str(older)
    (record,) = events()
    assert (record["moved_to"], record["cause"]) == (None, "checkpoint_corrupt")
    assert "could not be renamed" in session.said[0]
