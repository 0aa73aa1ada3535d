"""A checkpoint is saved in memory or directly, and is complete and finite either way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Guarded, Trainer, named

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.rank.saving.trainer_contents import TrainerContents
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.snapshots.area import StagingArea

Events = Callable[[], list[dict[str, Any]]]


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


def test_the_script_does_not_notice_a_required_snapshot(either: Guarded, out: Path) -> None:
    """No best model, no model card, no entry in the trainer's state, no checkpoint in its directory."""
    state: Any = either.trainer.state
    state.stateful_callbacks = {"EarlyStoppingCallback": [{"args": 1}]}

    def during(path: Path) -> None:
        assert either.trainer.args.save_strategy == "no"
        state.stateful_callbacks["EarlyStoppingCallback"].append({"args": 2})
        state.stateful_callbacks["TrainerControl"] = {}
        written = json.loads(json.dumps(state.stateful_callbacks))
        assert written == {"EarlyStoppingCallback": [{"args": 1}]}

    either.trainer.during = during
    either.trainer.state.global_step = 5
    either.saver.cadence.decide(5, agreed=False, required=True)
    either.trainer._maybe_log_save_evaluate(0.5)
    assert state.stateful_callbacks == {"EarlyStoppingCallback": [{"args": 1}]}
    assert either.trainer.cards == 0
    assert not list(out.glob("checkpoint-*"))


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
