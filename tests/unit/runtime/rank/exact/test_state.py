"""A resumed call restores its exact state; a checkpoint that does not fit is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import Begun, Trainer, read_json

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact.format import rank_state_path


def test_a_checkpoint_of_another_tool_is_accepted_with_a_warning(
    begin: Begun, warned: list[str], tmp_path: Path
) -> None:
    """The trainer is not changed."""
    trainer = Trainer(_step=0)
    begin(trainer, tmp_path)
    assert trainer._step == 0
    assert len(warned) == 1
    assert str(tmp_path) in warned[0]
    assert "may differ" in warned[0]


def test_a_trainer_without_rollouts_is_supported(begin: Begun, tmp_path: Path) -> None:
    """The SFT trainer, for example."""
    trainer, fresh = Trainer(_tr_loss=torch.tensor(0.5)), Trainer()
    for one in (trainer, fresh):
        for name in ("_step", "_buffered_inputs", "_logs", "_pending_extra_logs", "_pending_metrics"):
            delattr(one, name)
        del one.args.steps_per_generation, one.num_iterations
    begin(trainer).save(tmp_path)
    begin(fresh, tmp_path)
    assert fresh._tr_loss == 0.5
    assert read_json(tmp_path)["geometry"] is None


def test_files_of_another_step_or_number_of_ranks_are_rejected(begin: Begun, tmp_path: Path) -> None:
    """The file of rank 0 does not replace a missing one; the directory may have files of two checkpoints."""
    begin(Trainer(), world_size=2).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank1\.json is missing"):
        begin(Trainer(), tmp_path, rank=1, world_size=2)
    trainer = Trainer()
    trainer.state.global_step = 4
    with pytest.raises(CheckpointError, match="is of step 3, but the checkpoint is of step 4"):
        begin(trainer, tmp_path, world_size=2)


TAGGED = {"@": "tensor", "name": "t99", "device": "cpu"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, TAGGED) for name in ("buffered_inputs", "sampler", "epoch_rng")),
        ("buffered_inputs", 5),
        ("buffered_inputs", [1]),
        ("tables", 5),
        ("tables", {"_metrics": 5}),
        ("tables", {"_metrics": {"train": [1]}}),
        ("tables", {"_metrics": {"train": TAGGED}}),
        ("sampler", 5),
        ("sampler", [1]),
        ("epoch_rng", 5),
        ("epoch_rng", {"torch": 1}),
        ("rewards", 5),
        ("rewards", [{"state": 1}]),
        ("loss", 5),
        ("loss", {"pending": 0.5}),
        ("micro_step", "5"),
        ("gradient_order", ["x"]),
    ],
)
def test_an_invalid_value_is_rejected(begin: Begun, tmp_path: Path, name: str, value: Any) -> None:
    """For every field, the error is a CheckpointError, not an error of a library."""
    begin(Trainer(_step=5, _buffered_inputs=[{}, {}])).save(tmp_path)
    path = rank_state_path(tmp_path, 0)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(CheckpointError):
        begin(Trainer(), tmp_path)


def test_random_number_generators_are_loaded_from_the_checkpoint(begin: Begun, tmp_path: Path) -> None:
    """Persistent data-loader workers make this necessary."""
    begin(Trainer()).save(tmp_path)
    trainer = Trainer()
    trainer.args.dataloader_num_workers, trainer.args.dataloader_persistent_workers = 1, True
    state = begin(trainer, tmp_path)
    state.begin_epoch()
    state.begin_step()
    assert trainer.loaded_rng == [str(tmp_path)]


@pytest.mark.parametrize("evaluated", [False, True])
def test_the_mode_of_the_model_is_restored(begin: Begun, tmp_path: Path, evaluated: bool) -> None:
    """An evaluation leaves evaluation mode, and after the last step trainers log what belongs to the mode."""
    trainer, fresh = Trainer(), Trainer()
    trainer.model.train(not evaluated)
    begin(trainer).save(tmp_path)
    begin(fresh, tmp_path)
    assert fresh.model.training != evaluated
