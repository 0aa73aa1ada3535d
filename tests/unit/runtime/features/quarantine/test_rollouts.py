"""Quarantine on a trainer: which rows it replaces, when, and what it records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_run.runtime.features.quarantine._files import read_rollout
from grpo_run.runtime.features.quarantine.events import QuarantinedPrompt, RolloutPosition
from grpo_run.runtime.features.quarantine.rank import PART, prompt_digest
from grpo_run.runtime.features.quarantine.settings import RankQuarantine
from grpo_run.runtime.rank.points import RolloutPoints
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream.patches import wrapped_methods

BAD = QuarantinedPrompt(sha256=prompt_digest({"prompt": "b"}).sha256, train_call=1, from_step=4)


class Trainer:
    """Returns the prompts that it would generate from."""

    def __init__(self, step: int, *, training: bool = True) -> None:
        self.state = SimpleNamespace(global_step=step - 1)
        self.model = SimpleNamespace(training=training)
        self.train_dataset = [{"prompt": "b"}, {"prompt": "z"}]

    def _generate_and_score_completions(self, inputs: list[dict[str, str]]) -> str:
        return "".join(row["prompt"] for row in inputs)


def rollout(trainer: Trainer, text: str, **settings: Any) -> tuple[str, Any]:
    """What is generated from in a rollout of these prompts, and why rows leave."""
    told = RankQuarantine(**{"prompts": (BAD,), **settings}).model_dump(mode="json")
    session = SimpleNamespace(settings=SimpleNamespace(features={"quarantine": told}))
    points = RolloutPoints(facts=TrainerFacts.of(trainer, 1))
    PART.rollouts(trainer, session, 1, points)  # type: ignore[arg-type]
    with wrapped_methods(trainer, {"_generate_and_score_completions": points.inputs}):
        result = trainer._generate_and_score_completions([{"prompt": letter} for letter in text])
    return result, points.row_reasons()


def test_a_prompt_is_replaced_from_its_step_on() -> None:
    """And not in an earlier step, which is done again after a fault."""
    assert rollout(Trainer(3), "aabb") == ("aabb", ["", "", "", ""])
    assert rollout(Trainer(4), "aabb") == ("aaaa", ["", "", "quarantined", "quarantined"])
    assert rollout(Trainer(9), "bb") == ("zz", ["quarantined", "quarantined"])


def test_an_evaluation_and_another_call_keep_their_prompts() -> None:
    """An evaluation measures its own prompts."""
    assert rollout(Trainer(4, training=False), "ab") == ("ab", ["", ""])
    other = BAD.model_copy(update={"train_call": 2})
    assert rollout(Trainer(4), "ab", prompts=(other,)) == ("ab", None)


def test_only_the_suspected_rollout_is_recorded(tmp_path: Path) -> None:
    """Once, with the prompts that the sampler gave."""
    path = tmp_path / "rank0.prompts.json"
    position = RolloutPosition(train_call=1, step=4)
    for step in (3, 5):
        rollout(Trainer(step), "ab", prompts=(), suspected=position, file=str(path))
        assert not path.exists()
    assert rollout(Trainer(4), "ab", prompts=(), suspected=position, file=str(path)) == ("ab", None)
    assert [one.preview for one in read_rollout(path, position)] == ["a", "b"]


def test_a_trainer_without_quarantine_is_left_alone() -> None:
    """No method is wrapped."""
    trainer, session = Trainer(4), SimpleNamespace(settings=SimpleNamespace(features={}))
    points = RolloutPoints(facts=TrainerFacts.of(trainer, 1))
    PART.rollouts(trainer, session, 1, points)  # type: ignore[arg-type]
    assert points.inputs == []
    assert points.row_reasons() is None
