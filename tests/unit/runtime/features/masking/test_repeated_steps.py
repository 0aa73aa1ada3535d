"""What failed in a step fails again when the step is done again, for the same completions and no others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.journal import event
from support.wrapped import with_feature

from grpo_run.runtime.features.masking._repeated import EarlierMasking, completion_checksum, read_earlier
from grpo_run.runtime.features.masking.events import MaskingReason, SampleMasked
from grpo_run.runtime.features.masking.rank import PART
from grpo_run.runtime.history.journal import Journal, read_newest
from grpo_run.runtime.rank.points import failed

TOKENS = [[1, 2], [3, 4], [5, 6]]


def excluded(**changes: Any) -> Any:
    """An event of attempt 0 of the first call: the reward of sample 4 did not come in time."""
    fields = {
        "attempt": 0, "count": 1, "train_call": 1, "rollout": 6, "function": "judge", "reason": "timeout",
        "samples": [4], "digests": [completion_checksum(TOKENS[1])], "evaluating": False,
    }  # fmt: skip
    return event("sample_masked", **fields | changes)


def rows(*records: Any, rollout: int = 6, function: str = "judge", first: int = 3) -> dict[int, str]:
    """What fails again in a rank whose samples begin with number 3, in attempt 2."""
    earlier = EarlierMasking.of(records, train_call=1, attempt=2)
    return earlier.rows(rollout, function, first, TOKENS)


def test_a_reward_fails_again_for_the_same_completion() -> None:
    """At its place among the samples of all ranks."""
    assert rows(excluded()) == {1: MaskingReason.timeout}


@pytest.mark.parametrize(
    "changes",
    [
        {"train_call": 2},
        {"attempt": 2},
        {"evaluating": True},
        {"digests": [7]},
        {"digests": None},
        {"samples": [3]},
        {"samples": [4, 5]},
        {"rollout": 3},
        {"function": None},
    ],
)
def test_nothing_else_fails_again(changes: dict[str, Any]) -> None:
    """Another call, the present attempt, other completions, and events that cannot be read."""
    assert rows(excluded(**changes)) == {}


def test_the_last_attempt_that_did_the_step_counts() -> None:
    """Events of ranks and functions add up."""
    later = excluded(attempt=1, samples=[3], digests=[completion_checksum(TOKENS[0])])
    other = excluded(attempt=1, samples=[5], digests=[completion_checksum(TOKENS[2])], reason="exception")
    assert rows(excluded(), later, other) == {0: MaskingReason.timeout, 2: MaskingReason.exception}
    assert rows(later, excluded()) == {0: MaskingReason.timeout}


def test_the_end_of_the_journal_is_read(tmp_path: Path, session: Any) -> None:
    """A line that is cut by the limit is left out. The first attempt has nothing before it."""
    path = tmp_path / "some.jsonl"
    journal = Journal(path, "run-1")
    for number in range(20):
        journal.write(event("step_committed", step=number))
        journal.write(event("sample_masked", step=number, samples=[number], count=1, reason="nan"))
    found = [one.step for one in read_newest(path, SampleMasked, 1000)]
    assert found == list(range(20))[-len(found) :]
    assert 2 <= len(found) < 10
    assert len(list(read_newest(path, SampleMasked, 10**6))) == 20
    assert list(read_newest(tmp_path / "none", SampleMasked, 10)) == []
    assert read_earlier(session, 1).rows(0, "judge", 0, TOKENS) == {}


def test_the_next_attempt_excludes_what_the_last_one_has_excluded(
    either: Any, session: Any, journal: Journal
) -> None:
    """Although the function now returns a reward; what is written says the same."""
    inputs = [{"prompt": prompt} for prompt in ["ab12cd"] * 4 + ["xy34zw"] * 4]
    rewards = [1.0, 2.0, 4.0, 0.0, 3.0, 0.5, 0.0, 1.5]
    either.reward_func_names, either.reward_processing_classes = ["judge"], [None]
    either.reward_weights = either.reward_weights[:1]
    found = []
    for attempt, values in enumerate(([1.0, failed(MaskingReason.timeout), math.nan, *rewards[3:]], rewards)):
        journal.attempt = attempt
        session.settings = session.settings.model_copy(update={"attempt": attempt})
        either.reward_funcs = [lambda values=values, **_: list(values)]
        with with_feature(PART, either, session, 3):
            found.append(either._generate_and_score_completions(inputs)["advantages"].tolist())
    assert found[0] == found[1]
    assert found[1][1] == found[1][2] == 0
    path = Path(session.config.run_directory) / "journal.jsonl"
    events = [(one.reason, one.samples) for one in read_newest(path, SampleMasked, 10**6)]
    assert events == [("timeout", [1]), ("nan", [2])] * 2
