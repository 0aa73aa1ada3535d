"""Snapshots of a stop, of `grpo-run save` and of the last step: never left out, and not noticed by the
script.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.saving import Guarded

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.errors import Stopped


def end_step(guarded: Guarded, step: int, **due: bool) -> None:
    """Finish a step after which a snapshot is required."""
    guarded.trainer.state.global_step = step
    guarded.saver.cadence.decide(step, agreed=False, required=True, **due)
    guarded.trainer._maybe_log_save_evaluate(0.5)


def place(out: Path, step: int) -> Path:
    return out.with_name("out_grpo_run") / "run-1" / "call-1" / f"snapshot-{step}"


def test_without_memory_a_required_snapshot_is_written_to_its_folder_at_once(
    direct: Guarded, out: Path
) -> None:
    """Also where nothing is staged at all (several nodes)."""
    end_step(direct, 7)
    manifest = read_manifest(place(out, 7))
    verify_digests(place(out, 7), manifest.files)
    assert "weights.pt" in manifest.files
    assert not manifest.scheduled
    assert not out.exists()
    assert os.listdir(place(out, 7).parent) == ["snapshot-7"], "nothing half-written is left"


def test_in_memory_a_required_snapshot_is_not_dropped_for_a_newer_one(staged: Guarded) -> None:
    """It is written to disk before its slot is used again."""
    end_step(staged, 5)
    for step in (6, 7, 8):
        staged.step(step)
    assert 5 in dict(staged.staged)


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
    end_step(either, 5)
    assert state.stateful_callbacks == {"EarlyStoppingCallback": [{"args": 1}]}
    assert either.trainer.cards == 0
    assert not list(out.glob("checkpoint-*"))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_stop_ends_the_call_after_its_checkpoint(either: Guarded, scheduled: bool) -> None:
    """At once: the events at the end of an epoch or a call belong to the run that goes on. What the script
    has saved is not saved again.
    """
    either.saver.stopping, either.trainer.should_save = True, scheduled
    with pytest.raises(Stopped):
        end_step(either, 5)
    assert either.saver.saved_step == 5
    assert len(either.trainer.seen) == 1


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("asked", ["before", "during"])
def test_what_is_saved_while_a_stop_is_pending_is_the_checkpoint_of_the_stop(
    staged: Guarded, board: Board, asked: str, scheduled: bool
) -> None:
    """The vote of the step knew nothing of the request; a further step would be saved again."""
    staged.step(4, due=True)
    if asked == "before":
        board.request_stop()
    staged.trainer.during = lambda path: board.request_stop()
    with pytest.raises(Stopped):
        staged.step(5, scheduled=scheduled)
    assert staged.staged[0] == (5, scheduled)


def test_a_step_without_a_checkpoint_does_not_stop_before_all_ranks_know(
    staged: Guarded, board: Board
) -> None:
    """Its vote carries the request; the others may have begun the next step."""
    board.request_stop()
    staged.step(5, due=False)
    assert staged.staged == []


@pytest.mark.parametrize("end", ["epoch", "script", "last step"])
def test_a_snapshot_at_the_end_of_an_epoch_is_taken_after_its_events(staged: Guarded, end: str) -> None:
    """The trainer may evaluate there, and callbacks may change: a resumed run does not repeat it."""
    if end == "epoch":
        staged.trainer.state.epoch = 2.0
    elif end == "script":
        staged.trainer.control.should_training_stop = True
    else:
        staged.trainer.state.max_steps = 5
    staged.step(5)
    assert staged.staged == []
    staged.exact_state.epoch_ended = True
    staged.trainer._maybe_log_save_evaluate(0.5)
    assert staged.staged == [(5, False)]


def test_a_stop_lets_a_call_end_that_the_script_ends(staged: Guarded) -> None:
    """The call is finished; the stop takes effect before the next one."""
    staged.saver.stopping = True
    staged.trainer.control.should_training_stop = True
    end_step(staged, 5)
    staged.exact_state.epoch_ended = True
    staged.trainer._maybe_log_save_evaluate(0.5)
    assert staged.staged == [(5, False)]


def test_a_checkpoint_of_the_user_is_kept(direct: Guarded, out: Path) -> None:
    """Newer checkpoints and snapshots do not remove it, nor do they count it."""
    end_step(direct, 5, kept=True)
    end_step(direct, 6)
    newest = direct.save(7)
    rotate(out, newest=newest, limit=1, best=None)
    assert read_manifest(place(out, 5)).kept
    assert not place(out, 6).exists()
    assert os.listdir(out) == ["checkpoint-7"]
