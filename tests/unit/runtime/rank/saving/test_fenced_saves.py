"""In a run over several hosts a checkpoint is written apart and published through the attempt's fence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.saving import Guarded, Trainer, named

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest
from grpo_run.runtime.checkpoints.publishing import begin_attempt
from grpo_run.runtime.errors import Superseded
from grpo_run.runtime.rank.step.events import finish

Events = Callable[[], list[dict[str, Any]]]
REFUSED = "a newer attempt of this run has begun on other hosts; {} is not published"


@pytest.fixture
def fenced(out: Path, session: Any, call: TrainCall) -> Guarded:
    """A trainer of an attempt over several hosts."""
    return begin(out, session, call)


def begin(out: Path, session: Any, call: TrainCall) -> Guarded:
    """Begin an attempt over several hosts."""
    session.fences[os.path.realpath(out)] = newer(out, session)
    return Guarded(Trainer(out), session, call)


def newer(out: Path, session: Any) -> Path:
    """Begin an attempt elsewhere; return its fence."""
    fence = fencing.prepare(out, session.config.run_id)
    begin_attempt(fence, out, session.config.run_id)
    return fence


def published(path: Path) -> bool:
    """Whether a checkpoint is complete."""
    verify_digests(path, read_manifest(path).files)
    return True


def test_nothing_is_seen_before_it_is_complete(fenced: Guarded, out: Path, session: Any) -> None:
    """Neither the script's own checkpoint nor a snapshot; nothing else stays in the directory."""
    places: list[Path] = []
    fenced.trainer.during = places.append
    assert published(fenced.save(5))
    fenced.saver.cadence.decide(6, agreed=False, required=True)
    fenced.trainer.state.global_step = 6
    fenced.saver.after_step()
    (snapshot,) = out.glob("_grpo_run/*/call-1/snapshot-6")
    assert published(snapshot)
    assert not any(out == path.parent or path.is_relative_to(snapshot.parent) for path in places)
    fencing.close(session.fence(out))
    assert {path.name for path in out.iterdir()} == {"checkpoint-5", "_grpo_run"}
    assert [path.name for path in out.glob("_grpo_run/*/*")] == ["call-1"]
    assert [path.name for path in out.parent.iterdir() if path.name.startswith("out")] == ["out"]


@pytest.mark.parametrize("moment", ["before", "in the middle of", "after"])
def test_a_superseded_attempt_ends_in_order(
    fenced: Guarded, out: Path, session: Any, events: Events, moment: str
) -> None:
    """Whenever the newer one begins: one line and a warning, and nothing of it stays."""
    fenced.save(5)

    def interrupt(path: Path) -> None:
        newer(out, session)
        if moment == "in the middle of":
            (path / "more").write_text("")  # as a library does, into what the newer attempt has removed

    if moment == "before":
        newer(out, session)
    elif moment == "in the middle of":
        fenced.trainer.during = interrupt
    else:
        fenced.exact_state.save = lambda folder: (fenced._save_exact(folder), newer(out, session))
    with pytest.raises(Superseded) as raised:
        fenced.save(6)
    assert raised.value.code == 1
    assert session.notified[-1:] == [REFUSED.format("checkpoint-6")]
    assert named(events, "warning")[-1]["text"] == REFUSED.format("checkpoint-6")
    assert {path.name for path in out.iterdir()} <= {"checkpoint-5", "_grpo_run"}
    assert not list(out.parent.rglob(f"{fencing.WRITING}*"))


def test_a_failure_of_the_save_itself_is_raised(fenced: Guarded) -> None:
    """While no newer attempt has begun."""
    fenced.trainer.during = shutil.rmtree
    with pytest.raises(FileNotFoundError):
        fenced.save(5)


def test_the_best_checkpoint_and_the_upload_have_the_published_name(fenced: Guarded, out: Path) -> None:
    """The trainer finds the best one where it will be, also in its own record; the upload waits for it."""
    pushed: list[tuple[str, bool]] = []
    trainer, recorded = fenced.trainer, list[str]()

    def push(folder: str) -> None:
        pushed.append((folder, published(Path(folder))))

    def during(path: Path) -> None:
        trainer.state.best_model_checkpoint = str(path)
        trainer.state.save_to_json(str(path / "trainer_state.json"))
        trainer._push_from_checkpoint(str(path))  # type: ignore[attr-defined]

    trainer._push_from_checkpoint = push  # type: ignore[attr-defined]
    trainer.state.save_to_json = lambda path: recorded.append(trainer.state.best_model_checkpoint)
    trainer.during = during
    fenced.save(5)
    assert recorded == [str(out / "checkpoint-5")]
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-5")
    assert pushed == [(str(out / "checkpoint-5"), True)]
    trainer.during = lambda path: None
    fenced.save(6)
    assert len(pushed) == 1


def test_the_end_of_a_call_is_not_recorded_by_a_superseded_attempt(
    fenced: Guarded, out: Path, session: Any, call: TrainCall, events: Events
) -> None:
    """The newer attempt may do the steps again."""
    path = fenced.save(5)
    newer(out, session)
    with pytest.raises(Superseded):
        finish(session, call, fenced.saver, 5)
    assert not read_manifest(path).finished
    assert "has begun on other hosts" in session.notified[-1]
    assert named(events, "train_ended") == []


def test_older_checkpoints_are_removed_through_the_fence(out: Path, session: Any, call: TrainCall) -> None:
    """As on one host, by the script's limit."""
    guarded = begin(out, session, call)
    guarded.trainer.args.save_total_limit = 2
    for step in (5, 6, 7):
        guarded.save(step)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-7"]
    assert list(session.fence(out).iterdir()) == []
