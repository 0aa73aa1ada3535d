"""At the end of a rollout another number of ranks can go on; where ranks hold what is theirs, the reason is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exact import Begun, Trainer

from grpo_run.runtime.errors import UsageError
from grpo_run.trainers.exact import state
from grpo_run.trainers.exact.format import Geometry, RankState, RewardState
from grpo_run.trainers.exact.resharding import carried
from grpo_run.trainers.exact.state import ReshapeError, can_reshape

OLD = Geometry(steps_per_generation=2, num_iterations=2, accumulation=2)


def of_ranks(count: int, **changes: Any) -> list[RankState]:
    fields = {"schema_version": 1, "world_size": count, "step": 4, "geometry": OLD, "micro_step": 8}
    return [RankState(**(fields | {"rank": rank} | changes)) for rank in range(count)]


def test_a_rollout_boundary_is_carried_to_half_the_ranks() -> None:
    """With twice the accumulation and twice the micro-batches a rollout, micro-steps double."""
    new = Geometry(steps_per_generation=4, num_iterations=2, accumulation=4)
    found = carried(of_ranks(2, tables={"_metrics": {"train": {"reward": [1.0]}}}), 1, new)
    assert (found.micro_step, found.geometry) == (16, new)
    assert found.micro_step == found.step * new.accumulation
    assert found.tables == {"_metrics": {"train": {"reward": [1.0]}}}


@pytest.mark.parametrize(
    ("changes", "new", "complaint"),
    [
        ({"micro_step": 6}, OLD, "inside a rollout"),
        ({}, Geometry(steps_per_generation=2, num_iterations=2, accumulation=4), "by the same factor"),
        ({"reference": "sharded"}, OLD, "in 2 shards"),
    ],
)
def test_what_is_bound_to_its_ranks_is_not_carried(
    changes: dict[str, Any], new: Geometry, complaint: str
) -> None:
    """A usage error that says why."""
    with pytest.raises(ReshapeError, match=complaint) as caught:
        carried(of_ranks(2, **changes), 1, new)
    assert isinstance(caught.value, UsageError)


def test_rewards_that_remember_differently_on_each_rank_are_not_carried() -> None:
    """No rank's memory is the run's; where all are alike, it is."""
    alike = of_ranks(2, rewards=[RewardState(name="seen", state=1)])
    assert carried(alike, 1, OLD).rewards == alike[0].rewards
    apart = [alike[0], alike[1].model_copy(update={"rewards": [RewardState(name="seen", state=2)]})]
    with pytest.raises(ReshapeError, match="state of their own on each rank"):
        carried(apart, 1, OLD)


def test_trainers_without_rollouts_can_be_carried_anywhere() -> None:
    """There is no boundary to be at."""
    assert carried(of_ranks(2, geometry=None, micro_step=None), 3, None).step == 4


@pytest.mark.parametrize(("micro_step", "reason"), [(4, None), (5, "inside a rollout")])
def test_can_reshape_tells_the_reason(
    begin: Begun, tmp_path: Path, micro_step: int, reason: str | None
) -> None:
    """None for what can be carried, and for the same number of ranks."""
    for rank in (0, 1):
        begin(Trainer(_step=micro_step), rank=rank, world_size=2).save(tmp_path)
    assert can_reshape(tmp_path, 2) is None
    found = can_reshape(tmp_path, 1)
    assert found is None if reason is None else reason in str(found)


def test_can_reshape_tells_what_cannot_be_read(begin: Begun, tmp_path: Path) -> None:
    """A file cut short, or none at all, is a reason and no crash."""
    assert "saved without grpo-run" in str(can_reshape(tmp_path, 1))
    begin(Trainer(), world_size=2).save(tmp_path)
    assert "rank1.json" in str(can_reshape(tmp_path, 1))


def test_fewer_ranks_go_on_from_rank_zeros_state(begin: Begun, tmp_path: Path) -> None:
    """With micro-steps counted anew; a rank that was not there starts from it too."""
    for rank in (0, 1):
        begin(Trainer(_step=4), rank=rank, world_size=2).save(tmp_path)
    fewer, more = Trainer(), Trainer()
    fewer.args.steps_per_generation, fewer.args.gradient_accumulation_steps = 4, 2
    begin(fewer, tmp_path)
    assert fewer._step == 8
    begin(more, tmp_path, rank=2, world_size=3)
    assert more._step == 4


def test_other_rollout_settings_inside_a_rollout_are_refused(begin: Begun, tmp_path: Path) -> None:
    """What is left of the rollout does not fit them."""
    begin(Trainer(_step=5, _buffered_inputs=[{}, {}])).save(tmp_path)
    trainer = Trainer()
    trainer.num_iterations = 3
    with pytest.raises(ReshapeError, match="inside a rollout"):
        begin(trainer, tmp_path)
    assert state.geometry_of(trainer) == Geometry(steps_per_generation=2, num_iterations=3, accumulation=1)
