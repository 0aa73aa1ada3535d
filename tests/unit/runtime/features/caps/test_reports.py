"""Cuts are journaled, a rollout that is done again is cut as before, and long prompts are found before the
first step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._prompts import check_prompts
from grpo_run.runtime.features.caps._reports import RolloutReports
from grpo_run.runtime.features.caps._rollout import CappedRollout, Cut, DeadlineDecision
from grpo_run.runtime.features.caps.rank import PART
from grpo_run.runtime.features.caps.settings import CapSettings
from grpo_run.runtime.rank.points import RolloutPoints
from grpo_run.watchdog.observation import EndReason

Events = Callable[[], list[dict[str, Any]]]


def test_cuts_are_journaled(session: Any, events: Events) -> None:
    """A rollout without a cut leaves no line."""
    cut = Cut(length=3, reason=EndReason.repetition)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=7))
    reports = RolloutReports(trainer, session, CapSettings(repetition=8), 1)
    for cuts in ([None, cut, None], [None, None, None]):
        rollout = CappedRollout(end_tokens={1}, max_length=5)
        rollout.end_turn([[9], [9], [9]], [[5, 1], [5, 5, 5], [5, 6, 7, 8, 9]], cuts)
        rollout.steps = 5
        assert reports.begin() is None
        reports.ended(rollout)
    found = [event for event in events() if event["event"] == "completions_capped"]
    assert [(one["step"], one["completions"], one["repetition"], one["decoding_steps"]) for one in found] == [
        (7, 3, 1, 5)
    ]


def test_without_a_cap_the_trainer_stays_as_it_is(session: Any) -> None:
    """Not even its prompts are looked at."""
    trainer = SimpleNamespace()
    points = RolloutPoints()
    PART.rollouts(trainer, session, 1, points)
    assert points.generation == points.turns == points.leaving == []
    assert vars(trainer) == {}


def test_a_rollout_that_is_generated_again_gets_its_decision(session: Any) -> None:
    """By call, step, mode and number; another number of ranks decides anew."""
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=0), model=SimpleNamespace(training=True))
    settings = CapSettings(max_time=5.0)

    def decisions() -> list[DeadlineDecision | None]:
        found: list[DeadlineDecision | None] = []
        reports = RolloutReports(trainer, session, settings, 2)
        for step, training in ((0, True), (0, True), (1, False), (1, True)):
            trainer.state.global_step, trainer.model.training = step, training
            found.append(reports.begin())
            rollout = CappedRollout(end_tokens={1}, max_length=5)
            rollout.end_turn([[9]], [[5, 6]], [None])
            rollout.steps, rollout.timed_out_after = 10 * len(found), len(found) if training else None
            reports.ended(rollout)
        return found

    expected = [
        DeadlineDecision(steps=10, timed_out_after=1),
        DeadlineDecision(steps=20, timed_out_after=2),
        DeadlineDecision(steps=30, timed_out_after=None),
        DeadlineDecision(steps=40, timed_out_after=4),
    ]
    assert decisions() == [None] * 4
    assert decisions() == expected
    session.world_size = 7
    assert decisions() == [None] * 4


class Prompts(list[Any]):
    """A data set of prompts."""

    column_names = ("prompt",)

    def __getitem__(self, key: Any) -> Any:
        return list(self) if key == "prompt" else super().__getitem__(key)


def trainer_of(prompts: list[Any], window: int, **changes: Any) -> Any:
    """Return a trainer whose tokenizer makes a token of each character."""

    class Tokenizer:
        tokenized = 0

        def __call__(self, text: list[str]) -> dict[str, Any]:
            Tokenizer.tokenized += 1
            return {"input_ids": [list(text[0])]}

        def apply_chat_template(self, conversation: list[Any], **_: Any) -> dict[str, Any]:
            return self(["".join(message["content"] for message in conversation[0])])

    return SimpleNamespace(
        train_dataset=Prompts(prompts),
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=window)),
        processing_class=Tokenizer(),
        args=SimpleNamespace(vllm_max_model_length=None),
        **changes,
    )


@pytest.mark.parametrize("prompt", ["x" * 2000, [{"role": "user", "content": "x" * 2000}]])
def test_a_prompt_longer_than_the_window_is_an_error(prompt: Any) -> None:
    """It names the prompt and both lengths."""
    with pytest.raises(ConfigError, match=r"prompt 1 .* has 2000 tokens, .* window is 2000"):
        check_prompts(trainer_of(["short", prompt, prompt], 2000))
    check_prompts(trainer_of(["short", prompt], 2001))


def test_short_prompts_are_not_tokenized() -> None:
    """A token has at least one byte."""
    trainer = trainer_of(["x" * 100] * 50, 4096)
    check_prompts(trainer)
    assert trainer.processing_class.tokenized == 0


def test_the_window_of_vllm_counts_where_it_generates() -> None:
    """It may be shorter than the model's."""
    trainer = trainer_of(["x" * 2000], 10**6, use_vllm=True)
    check_prompts(trainer)
    trainer.args.vllm_max_model_length = 1500
    with pytest.raises(ConfigError, match="window is 1500"):
        check_prompts(trainer)


@pytest.mark.parametrize("data", [None, SimpleNamespace(column_names=["prompt"]), Prompts()])
def test_data_that_cannot_be_read_ahead_is_not_read(data: Any) -> None:
    """A stream has no length."""
    trainer = trainer_of([], 10)
    trainer.train_dataset = data
    check_prompts(trainer)
