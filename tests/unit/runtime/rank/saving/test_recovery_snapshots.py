"""Between the script's checkpoints, due snapshots are taken in memory, without side effects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Guarded, Trainer, memory_warnings, named

from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest
from grpo_run.runtime.rank.saving.saver import RETRY_STEPS, Saver
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.rank.saving.trainer_contents import TrainerContents
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.snapshots.area import StagingArea

Events = Callable[[], list[dict[str, Any]]]


def test_a_due_snapshot_is_taken(staged: Guarded, events: Events) -> None:
    """It stays in memory, is marked unscheduled, and uses the trainer's own method."""
    staged.step(4, due=False)
    assert staged.staged == []
    staged.step(5)
    assert staged.staged == [(5, False)]
    assert staged.trainer.seen == [(staged.trainer.model_wrapped, None, None)]
    assert staged.order == ["agree", "exact"]
    assert named(events, "checkpoint_staged")[0]["scheduled"] is False
    assert [step for step, _ in staged.taken] == [5]
    path = staged.drain()
    assert not read_manifest(path).scheduled


def test_a_saved_step_gets_no_snapshot(staged: Guarded) -> None:
    """Holds after the script's save, in memory or on disk, and for a second call at the end of an epoch."""
    staged.step(5, scheduled=True)
    assert staged.staged == [(5, True)]
    staged.step(6)
    staged.step(6)
    assert staged.staged == [(6, False), (5, True)]
    assert len(staged.trainer.seen) == 2
    staged.trainer.args.metric_for_best_model = "reward"
    staged.step(7, scheduled=True)
    assert staged.staged == [(6, False), (5, True)]
    assert len(staged.trainer.seen) == 3


def test_a_snapshot_without_memory_is_skipped(
    staged: Guarded, tmp_path: Path, lack_memory: Callable[[], None]
) -> None:
    """Nothing is written to disk. The user is warned once per attempt: the warning states the consequence."""
    lack_memory()
    staged.step(5)
    staged.step(5 + RETRY_STEPS)
    assert staged.staged == []
    assert not (tmp_path / "out").exists()
    assert memory_warnings(staged) == [5]
    assert staged.taken == []
    assert staged.saver.saved_step == -1


def test_snapshots_are_retried_after_some_steps(
    staged: Guarded, lack_memory: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abandoned copy costs as much as a full one, but the lack of memory may end."""
    lack_memory()
    staged.step(5)
    monkeypatch.undo()
    staged.step(6)
    staged.step(7, scheduled=True)
    assert staged.staged == []
    assert len(staged.trainer.seen) == 2, "the one without memory, and one written directly"
    staged.step(5 + RETRY_STEPS)
    assert staged.staged == [(5 + RETRY_STEPS, False)]


def test_the_chosen_interval_is_journaled(
    tmp_path: Path, session: Any, call: TrainCall, events: Events
) -> None:
    """By rank 0, once two snapshots have shown what they cost."""
    snapshots = Snapshots(session, StagingArea(tmp_path / "memory"))
    exact: Any = SimpleNamespace()
    trainer = Trainer(tmp_path / "out")
    contents = TrainerContents(trainer, TrainerFacts.of(trainer, 1), session, call, exact)
    made = Saver(contents, session, snapshots=snapshots, collect_vote=lambda: None)
    made.cadence.begin(0)
    made.cadence.taken(1, 0.5)
    made.cadence.taken(2, 0.5)
    (record,) = named(events, "snapshot_interval")
    assert (record["rank"], record["cost_seconds"], record["steps"] >= 1) == (0, 0.5, True)
    assert session.notified == []
    session.is_main = False
    made.cadence.taken(3, 5000.0)
    assert len(named(events, "snapshot_interval")) == 1


def test_a_snapshot_has_no_side_effects(staged: Guarded) -> None:
    """It creates no model card, uploads nothing and does not become the best checkpoint."""
    staged.trainer.args.push_to_hub = True
    seen: list[tuple[bool, str]] = []
    staged.trainer.during = lambda path: seen.append(
        (staged.trainer.args.push_to_hub, str(staged.trainer.args.save_strategy.value))
    )
    staged.step(5)
    assert seen == [(False, "no")]
    assert staged.trainer.args.push_to_hub is True
    assert staged.trainer.args.save_strategy == "steps"
    assert staged.trainer.cards == 0
    staged.trainer.args.push_to_hub = False
    staged.trainer.during = lambda path: None
    staged.save(6)
    assert staged.trainer.cards == 1
