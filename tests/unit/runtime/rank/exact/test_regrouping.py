"""A checkpoint is resumed with micro-batches of another size, also inside a rollout: same rows, same
order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import Trainer
from trl.trainer.utils import split_tensor_dict

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact.format import Geometry, SavedRankState
from grpo_run.runtime.rank.exact.geometry import ReshardError, regrouped, resplit

OLD = Geometry(steps_per_generation=4, num_iterations=2, accumulation=2)
HALVED = Geometry(steps_per_generation=8, num_iterations=2, accumulation=4)


def state(micro_step: int, **changes: Any) -> SavedRankState:
    fields = {
        "schema_version": 1,
        "rank": 1,
        "world_size": 2,
        "step": 3,
        "geometry": OLD,
        "micro_step": micro_step,
    }
    return SavedRankState.model_validate({**fields, "epoch_rng": "own", **changes})


@pytest.mark.parametrize("micro_step", [8, 6, 2])
def test_the_counter_is_scaled_and_the_rest_stays_the_ranks_own(micro_step: int) -> None:
    found = regrouped(state(micro_step), HALVED)
    assert (found.micro_step, found.geometry, found.epoch_rng) == (2 * micro_step, HALVED, "own")
    assert found.at_boundary == (micro_step == 8)
    assert regrouped(found, OLD) == state(micro_step)


def test_inside_a_rollout_the_iterations_must_be_the_same() -> None:
    other = Geometry(steps_per_generation=8, num_iterations=1, accumulation=2)
    with pytest.raises(ReshardError, match="is inside a rollout"):
        regrouped(state(6), other)
    assert regrouped(state(8), other).micro_step == 8


@pytest.mark.parametrize("micro_step", [8, 6])
def test_rollouts_of_other_optimizer_steps_are_refused(micro_step: int) -> None:
    with pytest.raises(ReshardError, match="by the same factor"):
        regrouped(state(micro_step), Geometry(steps_per_generation=4, num_iterations=2, accumulation=4))


def test_a_counter_between_two_larger_micro_batches_is_refused() -> None:
    larger = Geometry(steps_per_generation=2, num_iterations=2, accumulation=1)
    with pytest.raises(ReshardError):
        regrouped(state(5), larger)


def rollout(rows: int = 8) -> dict[str, Any]:
    return {
        "prompt_ids": torch.arange(2 * rows).reshape(rows, 2), "advantages": torch.arange(rows) / 2,
        "num_items_in_batch": torch.tensor(7), "old_per_token_logps": None, "num_images": None,
    }  # fmt: skip


def test_the_rows_are_split_as_trl_would_have_split_them() -> None:
    for before, after in ((2, 4), (4, 2), (2, 8), (8, 1), (4, 4)):
        found = resplit(split_tensor_dict(rollout(), before), after)
        expected = split_tensor_dict(rollout(), after)
        assert len(found) == len(expected) == after
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert torch.equal(one[name], other[name]) if other[name] is not None else one[name] is None


def test_images_stay_with_their_rows() -> None:
    """A row has one image, two, or none; an image has as many patches as its grid says."""
    images = [1, 2, 0, 1]
    grid = torch.tensor([[1, 2, 1], [1, 1, 1], [1, 3, 1], [1, 1, 2]])
    patches = int(grid.prod(1).sum())
    whole = {"prompt_ids": torch.arange(4).reshape(4, 1), "num_images": images, "image_grid_thw": grid}
    whole["pixel_values"] = torch.arange(patches, dtype=torch.float).reshape(patches, 1)
    parts = resplit([whole], 4)
    assert [part["pixel_values"].flatten().tolist() for part in parts] == [[0, 1], [2, 3, 4, 5], [], [6, 7]]
    (joined,) = resplit(parts, 1)
    assert joined["num_images"] == images
    assert torch.equal(joined["pixel_values"], whole["pixel_values"])
    assert torch.equal(joined["image_grid_thw"], grid)


def test_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(CheckpointError, match="8 rows cannot be divided into 3"):
        resplit([rollout()], 3)


def test_a_trainer_resumes_a_rollout_with_micro_batches_of_half_the_size(tmp_path: Path, again: Any) -> None:
    """Saved by one trainer, restored by one whose plan halves them."""
    saved = Trainer(_step=5, _buffered_inputs=split_tensor_dict(rollout(), 2))
    halved = Trainer(_step=0)
    halved.args.steps_per_generation *= 2
    halved.args.gradient_accumulation_steps *= 2
    found = again(saved, fresh=halved)
    assert found._step == 10
    assert [part["prompt_ids"][:, 0].tolist() for part in found._buffered_inputs] == [
        [0, 2],
        [4, 6],
        [8, 10],
        [12, 14],
    ]
