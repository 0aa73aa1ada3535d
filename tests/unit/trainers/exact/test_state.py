"""Everything a resumed call needs goes to disk and comes back, and what cannot is said once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import Begun, Clock, Trainer, read_json

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact import format


def test_the_micro_step_survives(again: Callable[..., Any]) -> None:
    """It decides when the next rollout is made."""
    assert again(Trainer(_step=4))._step == 4


def test_the_rollout_in_use_survives(again: Callable[..., Any]) -> None:
    """Its tensors, what is absent and what is no tensor."""
    rollout = [{"ids": torch.arange(4) + part, "old": None, "images": [1, 2]} for part in range(2)]
    found = again(Trainer(_step=5, _buffered_inputs=rollout))._buffered_inputs
    assert [part["ids"].tolist() for part in found] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert [(part["old"], part["images"]) for part in found] == [(None, [1, 2])] * 2


def test_a_rollout_that_is_used_up_is_not_written(again: Callable[..., Any], tmp_path: Path) -> None:
    """The next micro-step makes a new one."""
    rollout = [{"ids": torch.ones(4)}] * 2
    assert again(Trainer(_step=8, _buffered_inputs=rollout))._buffered_inputs is None
    assert read_json(tmp_path)["buffered_inputs"] is None


def test_what_is_gathered_for_the_next_log_line_survives(again: Callable[..., Any]) -> None:
    """In the containers that were there, with their kinds and lengths; NaN stays NaN."""
    trainer = Trainer()
    trainer._metrics["train"]["reward"] += [1.5, math.nan]
    trainer._metrics["train"]["num_tokens"] = [7]
    trainer._logs["prompt"].extend("abcdef")
    trainer._logs["rewards"]["overlap"].extend([0.5, math.inf])
    trainer._pending_extra_logs["note"] += ["x"]
    trainer._pending_metrics["depth"] += [3.0]
    found = again(trainer)
    assert found._metrics["train"]["num_tokens"] == [7]
    assert found._metrics["train"]["reward"][0] == 1.5
    assert math.isnan(found._metrics["train"]["reward"][1])
    assert found._metrics["train"]["new"] == []
    assert (list(found._logs["prompt"]), found._logs["prompt"].maxlen) == (list("cdef"), 4)
    assert list(found._logs["rewards"]["overlap"]) == [0.5, math.inf]
    assert found._logs["rewards"]["new"].maxlen == 4
    assert (found._pending_extra_logs, found._pending_metrics) == ({"note": ["x"]}, {"depth": [3.0]})


def test_logged_images_are_left_out_and_that_is_said_once(
    again: Callable[..., Any], warned: list[str]
) -> None:
    """They are pictures, not numbers; the texts beside them stay."""
    trainer = Trainer()
    trainer._logs["images"].append(object())
    trainer._logs["prompt"].append("a")
    found = again(trainer)
    assert (list(found._logs["images"]), list(found._logs["prompt"])) == ([], ["a"])
    assert warned == ["images logged with completions are not kept in checkpoints; the texts are"]


def test_an_object_in_a_log_costs_that_column_only(again: Callable[..., Any], warned: list[str]) -> None:
    """Named in one sentence."""
    trainer = Trainer()
    trainer._pending_extra_logs["odd"] = [object()]
    trainer._pending_extra_logs["even"] = [1]
    assert again(trainer)._pending_extra_logs == {"even": [1]}
    assert len(warned) == 1
    assert "_pending_extra_logs['odd'][0] is a object" in warned[0]


def test_completions_are_written_by_rank_zero_alone(begin: Begun, tmp_path: Path) -> None:
    """It is the one that shows them."""
    trainer = Trainer()
    trainer._logs["prompt"].append("a")
    for rank in (0, 1):
        begin(trainer, rank=rank, world_size=2).save(tmp_path)
    assert ["_logs" in read_json(tmp_path, rank)["tables"] for rank in (0, 1)] == [True, False]


def test_the_pending_loss_survives_to_the_bit(again: Callable[..., Any]) -> None:
    """So that the next logged loss is the mean over the same steps."""
    loss = torch.tensor(0.1) + torch.tensor(0.2)
    trainer = Trainer(
        _tr_loss=loss, _total_loss_scalar=1.25, _globalstep_last_logged=2, _initial_global_step=0
    )
    found = again(trainer)
    assert torch.equal(found._tr_loss, loss)
    numbers = (found._total_loss_scalar, found._globalstep_last_logged, found._initial_global_step)
    assert numbers == (1.25, 2, 0)


def test_the_tokens_trained_on_go_on_counting(again: Callable[..., Any]) -> None:
    """A number, or a tensor of one."""
    for count in (7, torch.tensor(7)):
        assert (
            again(
                Trainer(_total_train_tokens=count), fresh=Trainer(_total_train_tokens=0)
            )._total_train_tokens
            == 7
        )


def test_a_loss_that_is_no_number_stays_none(again: Callable[..., Any]) -> None:
    """Nothing is made up."""
    assert again(Trainer(_tr_loss=torch.tensor(math.nan)))._tr_loss.isnan()


def test_the_final_speed_is_over_all_attempts(begin: Begun, tmp_path: Path) -> None:
    """Its steps are, so its seconds must be."""
    clock, first, second, third = Clock(), Trainer(), Trainer(), Trainer()
    state = begin(first, clock=clock)
    clock.now += 60
    state.save(tmp_path)
    state = begin(second, tmp_path, clock=clock)
    clock.now += 5
    state.save(tmp_path)
    state = begin(third, tmp_path, clock=clock)
    assert third._finalize_training(None, 1, 1000.0) == "result"
    assert third.finalized == [1000.0 - 65]
    state.close()
    assert "_finalize_training" not in vars(third)


def test_a_save_after_the_end_counts_no_loss_twice(begin: Begun, tmp_path: Path) -> None:
    """By then the pending loss is in the total."""
    trainer = Trainer(_tr_loss=torch.tensor(0.5), _total_loss_scalar=2.5)
    state = begin(trainer)
    state.end()
    state.save(tmp_path)
    assert read_json(tmp_path)["loss"]["total"] == 2.0


def test_a_checkpoint_of_another_tool_is_accepted_and_said_to_be_inexact(
    begin: Begun, warned: list[str], tmp_path: Path
) -> None:
    """Nothing is changed."""
    trainer = Trainer(_step=0)
    begin(trainer, tmp_path)
    assert trainer._step == 0
    assert len(warned) == 1
    assert str(tmp_path) in warned[0]
    assert "may differ" in warned[0]


def test_a_trainer_without_rollouts_is_served(begin: Begun, tmp_path: Path) -> None:
    """As SFT's."""
    trainer, fresh = Trainer(_tr_loss=torch.tensor(0.5)), Trainer()
    for one in (trainer, fresh):
        for name in ("_step", "_buffered_inputs", "_logs", "_pending_extra_logs", "_pending_metrics"):
            delattr(one, name)
        del one.args.steps_per_generation, one.num_iterations
    begin(trainer).save(tmp_path)
    begin(fresh, tmp_path)
    assert fresh._tr_loss == 0.5
    assert read_json(tmp_path)["geometry"] is None


def test_a_rank_without_its_file_is_refused(begin: Begun, tmp_path: Path) -> None:
    """Rank 0's is not its own."""
    begin(Trainer(), world_size=2).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank1\.json is missing"):
        begin(Trainer(), tmp_path, rank=1, world_size=2)


def test_the_state_of_another_step_is_refused(begin: Begun, tmp_path: Path) -> None:
    """Files of two checkpoints were mixed."""
    begin(Trainer()).save(tmp_path)
    trainer = Trainer()
    trainer.state.global_step = 4
    with pytest.raises(CheckpointError, match="is of step 3, the checkpoint of 4"):
        begin(trainer, tmp_path)


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
def test_a_strange_part_is_refused(begin: Begun, tmp_path: Path, name: str, value: Any) -> None:
    """Whatever it is of: as a checkpoint that cannot be trusted, never with an error of a library's."""
    begin(Trainer(_step=5, _buffered_inputs=[{}, {}])).save(tmp_path)
    path = format.json_path(tmp_path, 0)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(CheckpointError):
        begin(Trainer(), tmp_path)


def test_random_numbers_are_loaded_from_the_checkpoint_resumed_from(begin: Begun, tmp_path: Path) -> None:
    """Where kept workers make that necessary."""
    begin(Trainer()).save(tmp_path)
    trainer = Trainer()
    trainer.args.dataloader_num_workers, trainer.args.dataloader_persistent_workers = 1, True
    state = begin(trainer, tmp_path)
    state.begin_epoch()
    state.begin_step()
    assert trainer.loaded_rng == [str(tmp_path)]
