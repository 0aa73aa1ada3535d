"""Values accumulated for the next log line and the final average are saved and restored."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import Begun, Clock, Trainer, read_json


def test_values_for_the_next_log_line_are_restored(again: Callable[..., Any]) -> None:
    """The containers keep their types and maximum lengths; NaN stays NaN."""
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


def test_logged_images_are_not_saved_with_one_warning(again: Callable[..., Any], warned: list[str]) -> None:
    """The texts logged with them are saved."""
    trainer = Trainer()
    trainer._logs["images"].append(object())
    trainer._logs["prompt"].append("a")
    found = again(trainer)
    assert (list(found._logs["images"]), list(found._logs["prompt"])) == ([], ["a"])
    assert warned == ["checkpoints do not contain images logged with completions; they contain the texts"]


def test_an_unsupported_object_in_a_log_loses_only_its_column(
    again: Callable[..., Any], warned: list[str]
) -> None:
    """One warning names the object."""
    trainer = Trainer()
    trainer._pending_extra_logs["odd"] = [object()]
    trainer._pending_extra_logs["even"] = [1]
    assert again(trainer)._pending_extra_logs == {"even": [1]}
    assert len(warned) == 1
    assert "_pending_extra_logs['odd'][0] is a object" in warned[0]


def test_completions_are_saved_by_rank_zero_only(begin: Begun, tmp_path: Path) -> None:
    """Only rank 0 logs completions."""
    trainer = Trainer()
    trainer._logs["prompt"].append("a")
    for rank in (0, 1):
        begin(trainer, rank=rank, world_size=2).save(tmp_path)
    assert ["_logs" in read_json(tmp_path, rank)["tables"] for rank in (0, 1)] == [True, False]


@pytest.mark.parametrize("loss", [torch.tensor(0.1) + torch.tensor(0.2), torch.tensor(math.nan)])
@pytest.mark.parametrize("count", [7, torch.tensor(7)])
def test_the_pending_loss_and_the_count_of_tokens_are_restored(
    again: Callable[..., Any], loss: torch.Tensor, count: Any
) -> None:
    """Bit for bit: the next logged loss is then the mean over the same steps. A loss that is not finite stays
    so. The count can be a number or a tensor.
    """
    numbers = {"_total_loss_scalar": 1.25, "_globalstep_last_logged": 2, "_initial_global_step": 0}
    trainer = Trainer(_tr_loss=loss, _total_train_tokens=count, **numbers)
    found = again(trainer, fresh=Trainer(_total_train_tokens=0))
    assert torch.equal(found._tr_loss.nan_to_num(-1), loss.nan_to_num(-1))
    assert {name: getattr(found, name) for name in numbers} == numbers
    assert found._total_train_tokens == 7


def test_the_final_speed_is_computed_over_all_attempts(begin: Begun, tmp_path: Path) -> None:
    """The training time covers all attempts, like the number of steps."""
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


def test_a_save_after_the_loop_does_not_count_the_loss_twice(begin: Begun, tmp_path: Path) -> None:
    """After the loop, the total contains the pending loss."""
    trainer = Trainer(_tr_loss=torch.tensor(0.5), _total_loss_scalar=2.5)
    state = begin(trainer)
    state.end()
    state.save(tmp_path)
    assert read_json(tmp_path)["loss"]["total"] == 2.0
