"""A checkpoint is saved in memory or directly, and is complete and finite either way."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saving import Guarded, Trainer, named
from support.vote_groups import ScriptedVotes
from transformers import TrainerCallback

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.watchdog.observation import Phase, Slot

Events = Callable[[], list[dict[str, Any]]]


def test_a_full_disk_loses_the_model_card_but_not_the_save(either: Guarded, events: Events) -> None:
    """Only rank 0 writes the card, during a save in which the other ranks wait for it."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    either.trainer.create_model_card = full  # type: ignore[method-assign]
    either.save(5)
    assert "no model card" in named(events, "warning")[0]["text"]
    assert named(events, "checkpoint_published") or either.staged == [(5, True)]
    assert either.trainer.create_model_card is full


def test_another_error_of_the_model_card_is_raised(either: Guarded) -> None:
    """It is raised to the script, as without grpo-run."""

    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    either.trainer.create_model_card = refuse  # type: ignore[method-assign]
    with pytest.raises(PermissionError):
        either.save(5)


def test_a_failed_save_publishes_nothing(
    either: Guarded, events: Events, reading: Callable[[], Slot]
) -> None:
    """The exception is raised, and the trainer's arguments are restored. A script may catch it and continue;
    the rank is then not in `checkpoint`.
    """
    either.trainer.args.save_total_limit = 3
    either.trainer.args.save_only_model = True

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    either.trainer.during = fail
    with pytest.raises(PermissionError):
        either.save(5)
    assert list(find_checkpoints(Path(either.trainer.args.output_dir))) == []
    assert named(events, "checkpoint_published") == named(events, "checkpoint_staged") == []
    assert either.trainer.args.save_total_limit == 3
    assert either.trainer.args.save_only_model is True
    if either.given_snapshots is not None:
        assert either.staged == []
    assert Phase.checkpoint not in [entry.phase for entry in reading().phases]


def test_saving_is_shown(either: Guarded, session: Any, reading: Callable[[], Slot]) -> None:
    """The phase while it lasts, the step and the time afterwards."""
    during: list[Phase | None] = []
    either.trainer.during = lambda path: during.append(reading().phase)
    either.save(5)
    session.slot.publish()
    assert during == [Phase.checkpoint]
    assert reading().checkpoint_step == 5
    assert reading().phases == ()


def test_a_checkpoint_is_complete_although_the_script_saves_the_model_only(either: Guarded) -> None:
    """`save_only_model` is off while the method runs, and as the script had it afterwards."""
    either.trainer.args.save_only_model = True
    during: list[bool] = []
    either.trainer.during = lambda path: during.append(either.trainer.args.save_only_model)
    either.save(5)
    assert during == [False]
    assert either.trainer.args.save_only_model is True


def test_non_finite_weights_are_not_saved(either: Guarded, events: Events) -> None:
    """The refusal is printed and journaled once per step."""
    either.save(4)
    either.make_non_finite()
    either.trainer.seen.clear()
    path = either.save(5)
    either.save(5)
    assert either.trainer.seen == []
    assert not path.exists()
    (record,) = named(events, "checkpoint_rejected")
    assert (record["step"], record["cause"], record["path"]) == (5, "nonfinite", str(path))
    assert len(either.session.notified) == 1
    either.save(6)
    assert len(named(events, "checkpoint_rejected")) == 2


def test_all_ranks_refuse_if_one_rank_has_non_finite_weights(
    either: Guarded, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard differs from theirs; a partial save would leave ranks in a collective."""
    non_finite = SaveFlags(non_finite=True)
    session.votes = ScriptedVotes(lambda values: non_finite.as_values())
    either.save(5)
    assert either.trainer.seen == []
    assert len(session.votes.sent) == 1


def test_a_save_in_memory_has_the_manifest_of_a_direct_save_when_drained(
    staged: Guarded, call: TrainCall, events: Events
) -> None:
    """Training waits only for the copy."""
    staged.trainer.args.save_total_limit = 3
    path = staged.save(5)
    assert not path.exists()
    assert staged.staged == [(5, True)]
    (record,) = named(events, "checkpoint_staged")
    assert (record["step"], record["scheduled"], record["train_call"]) == (5, True, 1)
    assert named(events, "checkpoint_published") == []
    ((entry, _),) = staged.snapshots.staging.snapshots()
    assert (entry.limit, entry.attempt, entry.run_id) == (3, 0, "run-1")
    assert staged.drain() == path
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    assert {"weights.pt", "trainer_state.json", "exact.json"} == set(manifest.files)
    assert (manifest.train_call, manifest.global_batch, manifest.scheduled) == (call, 8, True)
    assert torch.equal(torch.load(path / "weights.pt")["weight"], staged.trainer.model.weight)
    assert staged.taken == [(5, staged.snapshots.cost_seconds)]


def test_a_relative_output_directory_is_resolved_at_the_start(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain worker has another working directory, and scripts may change theirs."""
    monkeypatch.chdir(tmp_path)
    snapshots = Snapshots(session, StagingArea(tmp_path / "memory"))
    call = TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir="out")
    guarded = Guarded(Trainer(Path("out")), session, call, snapshots)
    guarded.save(5)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert guarded.drain() == tmp_path / "out" / "checkpoint-5"


class CopyCallback(TrainerCallback):  # type: ignore[misc]
    """A callback of the script that reads the checkpoint."""

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Read the checkpoint."""


def test_a_callback_that_reads_the_checkpoint_finds_it_on_disk(
    staged: Guarded, polls: list[Callable[[], Any]]
) -> None:
    """The save returns when the checkpoint is durable."""
    staged.trainer.callback_handler.callbacks = [TrainerCallback(), CopyCallback()]
    polls += [lambda: None, staged.drain, lambda: None]
    path = staged.save(5)
    verify_digests(path, read_manifest(path).files)
    assert len(staged.trainer.seen) == 1
