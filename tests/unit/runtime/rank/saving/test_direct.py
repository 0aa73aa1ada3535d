"""A direct save is published after all ranks have written; older checkpoints are removed after it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Guarded, Trainer, named
from support.vote_groups import ScriptedVotes

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, TrainCall, read_manifest
from grpo_run.runtime.rank.saving import _direct as direct_module
from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.snapshots.headroom import DISK_RESERVE_BYTES

Events = Callable[[], list[dict[str, Any]]]


def test_a_checkpoint_is_published(direct: Guarded, call: TrainCall, events: Events) -> None:
    """With a valid manifest and a journal record. Arguments and result of the method are unchanged."""
    path = direct.save(5)
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    assert (manifest.run_id, manifest.step, manifest.world_size, manifest.train_call) == ("run-1", 5, 1, call)
    assert (manifest.global_batch, manifest.layout) == (8, "ddp")
    assert manifest.scheduled
    assert {"weights.pt", "trainer_state.json", "exact.json"} == set(manifest.files)
    (record,) = named(events, "checkpoint_published")
    assert (record["step"], record["path"], record["verified"]) == (5, str(path.resolve()), True)
    assert (record["scheduled"], record["train_call"]) == (True, 1)
    assert record["size_bytes"] == sum(entry.size for entry in manifest.files.values())
    assert direct.trainer._save_checkpoint("model", None) == "what the method returns"
    assert direct.trainer.seen[-1] == ("model", None, None)


def test_a_checkpoint_that_is_saved_again_is_unpublished_first(direct: Guarded) -> None:
    """A kill during the save must not leave the old manifest with new files."""
    path = direct.save(5)
    found: list[bool] = []
    direct.trainer.during = lambda path: found.append((path / MANIFEST).exists())
    direct.save(5)
    assert found == [False]
    assert (path / MANIFEST).exists()


def test_old_checkpoints_are_removed_after_the_new_one_is_complete(direct: Guarded) -> None:
    """The trainer itself removes none; afterwards `save_total_limit` holds."""
    first = direct.save(5)
    direct.trainer.args.save_total_limit = 1
    there: list[bool] = []
    direct.trainer.during = lambda path: there.append(first.exists())
    second = direct.save(10)
    assert there == [True]
    assert direct.trainer.seen[-1][2] is None
    assert not first.exists()
    assert read_manifest(second).step == 10


@pytest.mark.parametrize("better", [False, True])
def test_the_best_checkpoint_is_kept(direct: Guarded, better: bool) -> None:
    """The trainer's state names it; it may find a better one during the save, before old ones are removed."""
    best = direct.save(5)
    direct.save(6)
    state: Any = direct.trainer.state
    state.best_model_checkpoint = str(best)
    direct.trainer.args.save_total_limit = 1
    if better:
        direct.trainer.during = lambda path: setattr(state, "best_model_checkpoint", str(path))
    direct.save(10)
    names = sorted(path.name for path in best.parent.iterdir())
    assert names == (["checkpoint-10"] if better else ["checkpoint-10", "checkpoint-5"])


def test_a_checkpoint_is_published_after_all_ranks_have_written(
    direct: Guarded, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written after the vote."""
    path = Path(direct.trainer.args.output_dir) / "checkpoint-5"
    at_vote: list[tuple[bool, bool]] = []

    def answer(values: list[int]) -> list[int]:
        at_vote.append(((path / "exact.json").exists(), (path / MANIFEST).exists()))
        return values

    session.votes = ScriptedVotes(answer)
    direct.save(5)
    assert at_vote == [(False, False), (True, False)]


def test_only_rank_zero_publishes(direct: Guarded, session: Any, events: Events) -> None:
    """The other ranks write only their part."""
    session.is_main = False
    path = direct.save(5)
    assert (path / "weights.pt").exists()
    assert not (path / MANIFEST).exists()
    assert events() == []


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free space that the disk reports; the last entry applies."""
    free = [1 << 40]
    monkeypatch.setattr(
        direct_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[-1], total=1 << 41, used=0)
    )
    return free


def test_without_space_for_another_checkpoint_no_save_starts(
    direct: Guarded, session: Any, events: Events, free_bytes: list[int]
) -> None:
    """Each is journaled, one is printed, and saves continue when there is space again."""
    older = direct.save(5)
    (published,) = named(events, "checkpoint_published")
    free_bytes.append(published["size_bytes"] - 1)
    for step in (6, 7):
        assert not direct.save(step).exists()
    assert len(direct.trainer.seen) == 1
    assert [(event["step"], event["cause"]) for event in named(events, "checkpoint_failed")] == [
        (6, "disk_full"), (7, "disk_full"),
    ]  # fmt: skip
    assert len([text for text in session.notified if "is not saved" in text]) == 1
    verify_digests(older, read_manifest(older).files)
    free_bytes.append(published["size_bytes"])
    assert read_manifest(direct.save(8)).step == 8


def test_all_ranks_use_the_free_space_that_rank_zero_finds(
    direct: Guarded, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may see another disk; a rank that started a save alone would wait forever."""
    direct.save(5)
    session.is_main = False
    other = Guarded(Trainer(Path(call.output_dir)), session, call)
    monkeypatch.setattr(direct_module.shutil, "disk_usage", None)
    short = SaveFlags(non_finite=False, disk_short=True)
    session.votes = ScriptedVotes(lambda values: short.as_values())
    assert not other.save(6).exists()
    assert session.votes.sent == [SaveFlags(non_finite=False).as_values()]


def test_the_first_and_the_last_checkpoint_are_tried_on_a_full_disk(
    direct: Guarded, free_bytes: list[int]
) -> None:
    """The size of the first is not known, and the run was made for the last."""
    free_bytes.append(0)
    assert direct.save(5).exists()
    assert not direct.save(6).exists()
    direct.trainer.control.should_training_stop = True
    assert direct.save(7).exists()


def test_the_needed_space_is_known_from_an_earlier_attempt(
    direct: Guarded, session: Any, call: TrainCall, free_bytes: list[int]
) -> None:
    """Otherwise the first save of each attempt would fail on a full disk."""
    direct.save(5)
    again = Guarded(Trainer(Path(call.output_dir)), session, call)
    free_bytes.append(0)
    assert not again.save(6).exists()
    session.config = replace(session.config, run_id="another")
    assert Guarded(Trainer(Path(call.output_dir)), session, call).save(7).exists()


def test_a_disk_that_does_not_report_its_space_is_tried(
    direct: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error on rank 0 would leave the other ranks waiting."""
    direct.save(5)

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(direct_module.shutil, "disk_usage", stale)
    assert direct.save(6).exists()


def test_too_little_disk_space_is_warned_about_at_the_start(
    tmp_path: Path, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no warning if the space is enough."""
    one = 3 * 10 * 4  # a layer of 10 trained float32 numbers
    for free, warnings in ((DISK_RESERVE_BYTES + 3 * one - 1, 1), (DISK_RESERVE_BYTES + 3 * one, 0)):
        session.notified.clear()
        monkeypatch.setattr(
            direct_module.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        trainer = Trainer(tmp_path / "out")
        trainer.args.save_total_limit = 2
        Guarded(trainer, session, call)
        assert len(session.notified) == warnings
        assert all("0.0" not in text for text in session.notified)
