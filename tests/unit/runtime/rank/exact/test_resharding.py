"""A checkpoint at the end of a rollout can be resharded; otherwise the error gives the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exact import Begun, Trainer

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.exact._trainer_state import geometry_of
from grpo_run.runtime.rank.exact.format import Geometry, RewardState, SavedRankState
from grpo_run.runtime.rank.exact.geometry import ReshardError, resharded, resharding_problem

OLD = Geometry(steps_per_generation=2, num_iterations=2, accumulation=2)


def rank_states(count: int, **changes: Any) -> list[SavedRankState]:
    fields = {"schema_version": 1, "world_size": count, "step": 4, "geometry": OLD, "micro_step": 8}
    return [SavedRankState(**(fields | {"rank": rank} | changes)) for rank in range(count)]


def test_a_checkpoint_at_a_rollout_boundary_is_resharded_to_half_the_ranks() -> None:
    """With twice the accumulation and twice the micro-batches per rollout, the micro-step counter doubles."""
    new = Geometry(steps_per_generation=4, num_iterations=2, accumulation=4)
    found = resharded(rank_states(2, tables={"_metrics": {"train": {"reward": [1.0]}}}), 1, new)
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
def test_state_that_belongs_to_its_ranks_is_not_resharded(
    changes: dict[str, Any], new: Geometry, complaint: str
) -> None:
    """The error is a UsageError that gives the reason."""
    with pytest.raises(ReshardError, match=complaint) as caught:
        resharded(rank_states(2, **changes), 1, new)
    assert isinstance(caught.value, UsageError)


def test_reward_states_that_differ_between_ranks_are_not_resharded() -> None:
    """Equal states are kept; different states raise ReshardError."""
    equal = rank_states(2, rewards=[RewardState(name="seen", state=1)])
    assert resharded(equal, 1, OLD).rewards == equal[0].rewards
    different = [equal[0], equal[1].model_copy(update={"rewards": [RewardState(name="seen", state=2)]})]
    with pytest.raises(ReshardError, match="different state on each rank"):
        resharded(different, 1, OLD)


def test_trainers_without_rollouts_can_always_be_resharded() -> None:
    """Without rollouts, every step is a boundary."""
    assert resharded(rank_states(2, geometry=None, micro_step=None), 3, None).step == 4


@pytest.mark.parametrize(("micro_step", "reason"), [(4, None), (5, "inside a rollout")])
def test_the_reason_against_resharding_is_reported(
    begin: Begun, tmp_path: Path, micro_step: int, reason: str | None
) -> None:
    """The result is None at a rollout boundary, and for the same number of ranks."""
    for rank in (0, 1):
        begin(Trainer(_step=micro_step), rank=rank, world_size=2).save(tmp_path)
    assert resharding_problem(tmp_path, 2) is None
    found = resharding_problem(tmp_path, 1)
    assert found is None if reason is None else reason in str(found)


def test_an_unreadable_checkpoint_is_a_reason_against_resharding(begin: Begun, tmp_path: Path) -> None:
    """A missing folder or file gives a reason and raises nothing."""
    assert "saved without grpo-run" in str(resharding_problem(tmp_path, 1))
    begin(Trainer(), world_size=2).save(tmp_path)
    assert "rank1.json" in str(resharding_problem(tmp_path, 1))


def test_other_numbers_of_ranks_resume_from_the_state_of_rank_zero(begin: Begun, tmp_path: Path) -> None:
    """Fewer ranks convert the micro-step counter; a new rank resumes from the same state."""
    for rank in (0, 1):
        begin(Trainer(_step=4), rank=rank, world_size=2).save(tmp_path)
    fewer, more = Trainer(), Trainer()
    fewer.args.steps_per_generation, fewer.args.gradient_accumulation_steps = 4, 2
    begin(fewer, tmp_path)
    assert fewer._step == 8
    begin(more, tmp_path, rank=2, world_size=3)
    assert more._step == 4


def test_other_rollout_settings_inside_a_rollout_are_rejected(begin: Begun, tmp_path: Path) -> None:
    """The rest of the rollout does not fit the new settings."""
    begin(Trainer(_step=5, _buffered_inputs=[{}, {}])).save(tmp_path)
    trainer = Trainer()
    trainer.num_iterations = 3
    with pytest.raises(ReshardError, match="inside a rollout"):
        begin(trainer, tmp_path)
    assert geometry_of(trainer) == Geometry(steps_per_generation=2, num_iterations=3, accumulation=1)
