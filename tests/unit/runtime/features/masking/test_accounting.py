"""Counts, messages and repeated rewards, with real trainers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.journal import read_records
from support.wrapped import with_feature

from grpo_run.runtime.errors import RewardError
from grpo_run.runtime.features.masking._masking import ROLLOUTS_WITHOUT_REWARD
from grpo_run.runtime.features.masking._report import EMPTY_ROLLOUTS
from grpo_run.runtime.features.masking.events import MaskedSamples, MaskingReason
from grpo_run.runtime.features.masking.rank import PART
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.rank.points import failed

Score = Callable[..., Any]

NAN = math.nan
REWARDS = [1.0, 2.0, 4.0, 0.0, 3.0, 0.5, 0.0, 1.5]
INPUTS = [{"prompt": prompt} for prompt in ["ab12cd"] * 4 + ["xy34zw"] * 4]


@pytest.fixture
def events(session: Any, tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Read the journal's events of one name."""
    return lambda name: [
        {key: value for key, value in record.items() if key not in ("time", "monotonic", "run", "attempt")}
        for record in read_records(Path(session.config.run_directory) / "journal.jsonl")
        if record["event"] == name
    ]


def test_each_exclusion_is_accounted_for(
    either: Any, session: Any, rollout: Score, events: Any, capsys: Any
) -> None:
    """One event for each function and reason, with the samples; one for groups; one line on the terminal."""
    leaving = [""] * 7 + ["deadline"]
    rollout(either, session, [NAN, *REWARDS[1:]],
    [failed(MaskingReason.timeout), 1.0, failed(MaskingReason.exception), math.inf, *REWARDS[4:]],
    leaving=leaving)  # fmt: skip
    excluded = [
        (record["function"], record["reason"], record["samples"]) for record in events("sample_masked")
    ]
    assert excluded == [
        ("reward_0", "nan", [0]), (None, "small_group", [1]), ("reward_1", "exception", [2]),
        ("reward_1", "infinite", [3]), (None, "deadline", [7]),
    ]  # fmt: skip
    (group,) = events("group_masked")
    assert (group["groups"], group["of"], group["step"], group["steps_without_samples"]) == ([0], 2, 1, 0)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("grpo-run:")] == [
        (
            "grpo-run: step 1: sample 0 of the rollout is excluded from baseline and loss: reward function"
            " reward_0 returned NaN for it. Further ones are counted in grpo_samples_masked_total and by"
            " `grpo-run status`"
        )
    ]
    history = run_reader(RunDirectory(path=session.config.run_directory)).history()
    (sentence,) = history.part(MaskedSamples).ended()
    assert sentence == (
        "Excluded from the loss: 5 samples (nan 1, small_group 1, exception 1, infinite 1, deadline 1),"
        " 1 whole group."
    )


def test_steps_without_samples_are_counted(either: Any, session: Any, rollout: Score, events: Any) -> None:
    """AdamW moves the weights in them all the same."""
    either.args.steps_per_generation, before = 4, either.args.steps_per_generation
    either.num_iterations = 2
    try:
        rollout(either, session, [NAN] * 8)
    finally:
        either.args.steps_per_generation = before
    (group,) = events("group_masked")
    assert group["steps_without_samples"] == 8


def attached(trainer: Any, session: Any, function: Any) -> AbstractContextManager[None]:
    """Masking for a trainer with one function."""
    trainer.reward_funcs, trainer.reward_func_names = [function], ["broken"]
    trainer.reward_weights = trainer.reward_weights[:1]
    trainer.reward_processing_classes = [None]
    return with_feature(PART, trainer, session)


@pytest.mark.parametrize(
    ("broken", "returned"),
    [
        ([None] * 8, "None for all 8 completions"),
        ([1.0], "1 value for 8 completions"),
        (["good"] * 8, "'good' (str) for the first of 8 completions"),
        ([NAN] * 8, "nan (float) for the first of 8 completions"),
        (0.5, "0.5 (float) for 8 completions"),
        ("fine", "'fine' (str) for 8 completions"),
        ([failed(MaskingReason.timeout)] * 8, "no reward (timeout) for 8 completions"),
    ],
)
@pytest.mark.parametrize("valid_before", [0, 3])
def test_ten_rollouts_in_a_row_without_one_valid_reward_end_the_run(
    either: Any, session: Any, broken: Any, returned: str, valid_before: int
) -> None:
    """Wherever in the run; the function and what it returned are named at the first, and in the error."""
    answers = [REWARDS] * valid_before + [broken] * ROLLOUTS_WITHOUT_REWARD
    masking = attached(either, session, lambda **_: answers.pop(0))
    said = f"in step 1 reward function broken returned {returned}"
    with masking:
        for _ in range(valid_before):
            either._generate_and_score_completions(INPUTS)
        assert not any("valid reward" in text for text in session.notified)
        for _ in range(ROLLOUTS_WITHOUT_REWARD - 1):
            either._generate_and_score_completions(INPUTS)
            assert [said in text for text in session.notified].count(True) == 1
        with pytest.raises(RewardError) as error:
            either._generate_and_score_completions(INPUTS)
    assert said in str(error.value)
    assert len(str(error.value)) <= 200  # what a sentence shows of an exception


def test_a_valid_reward_begins_the_count_anew(either: Any, session: Any) -> None:
    """Nine and nine end nothing, and neither do rewards that are all 0."""
    almost = [[None] * 8] * (ROLLOUTS_WITHOUT_REWARD - 1)
    answers = [*almost, [None] * 7 + [0.0], *almost, *[[0.0] * 8] * (2 * ROLLOUTS_WITHOUT_REWARD)]
    masking = attached(either, session, lambda **_: answers.pop(0))
    with masking:
        while answers:
            either._generate_and_score_completions(INPUTS)


def test_evaluations_without_rewards_end_nothing(either: Any, session: Any) -> None:
    """They are counted neither themselves nor as a break in the count."""
    either.model.eval()
    masking = attached(either, session, lambda **_: [None] * 8)
    try:
        with masking:
            for _ in range(ROLLOUTS_WITHOUT_REWARD + 1):
                either._generate_and_score_completions(INPUTS)
    finally:
        either.model.train()


def test_an_evaluation_with_one_completion_loses_only_what_failed(
    either: Any, session: Any, rollout: Score, events: Any
) -> None:
    """There is no group to compare with, so there is none to lose."""
    either.model.eval()
    either.num_generations_eval = 1
    try:
        rollout(either, session, [NAN, *REWARDS[1:]])
    finally:
        either.model.train()
    (record,) = events("sample_masked")
    assert (record["samples"], record["evaluating"]) == ([0], True)


def test_many_rollouts_without_samples_are_a_warning(either: Any, session: Any) -> None:
    """One for each series of them."""
    empty: list[Any] = [[NAN] * 8]
    answers = [*empty * (EMPTY_ROLLOUTS + 1), REWARDS, *empty * (EMPTY_ROLLOUTS - 1)]
    masking = attached(either, session, lambda **_: answers.pop(0))
    with masking:
        while answers:
            either._generate_and_score_completions(INPUTS)
    assert ["nothing is learned" in text for text in session.notified].count(True) == 1


def test_a_subclass_that_combines_the_rewards_gets_failures_as_none(either: Any, session: Any) -> None:
    """What it returns is no table of functions, so nobody knows what a failure does to it."""
    masking = attached(either, session, lambda **_: [NAN, math.inf, *REWARDS[2:]])
    original = either._calculate_rewards
    either._calculate_rewards = lambda *arguments: original(*arguments).sum(1)
    with masking:
        found = either._calculate_rewards(INPUTS, [row["prompt"] for row in INPUTS], [""] * 8, [[1]] * 8)
    assert found.isnan().tolist() == [True] * 2 + [False] * 6


def test_other_trainers_are_left_alone(session: Any) -> None:
    """TRL has more trainers with methods of these names."""

    class OtherTrainer:
        """Computes rewards in its own way."""

        reward_funcs = (lambda **_: [NAN],)

        def _calculate_rewards(self) -> str:
            return "mine"

        def _generate_and_score_completions(self) -> str:
            return self._calculate_rewards()

    trainer = OtherTrainer()
    with with_feature(PART, trainer, session):
        assert trainer._generate_and_score_completions() == "mine"
        assert vars(trainer) == {}
