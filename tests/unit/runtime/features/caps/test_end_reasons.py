"""Why completions ended, over one turn and several."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from grpo_run.runtime.features.caps._reports import RolloutKey, read_decisions
from grpo_run.runtime.features.caps._rollout import (
    CappedRollout,
    Cut,
    DeadlineDecision,
    EndReason,
    continued,
    end_reason,
)
from grpo_run.runtime.rank.rollouts.limits import Deadline

EOS = 1


@pytest.mark.parametrize(
    ("tokens", "at", "expected"),
    [
        ([5, 6, EOS], None, EndReason.eos),
        ([5, 6, 7], None, EndReason.eos),  # a stopping criterion of the script
        ([5] * 10, None, EndReason.length),
        ([5] * 9 + [EOS], None, EndReason.eos),
        ([5] * 4, Cut(length=4, reason=EndReason.deadline), EndReason.deadline),
        ([5] * 10, Cut(length=10, reason=EndReason.repetition), EndReason.repetition),
        (
            [5] * 10,
            Cut(length=12, reason=EndReason.repetition),
            EndReason.length,
        ),  # the trainer cut it before
        ([], None, EndReason.eos),
    ],
)
def test_each_completion_has_one_reason(tokens: list[int], at: Cut | None, expected: EndReason) -> None:
    """A cap, its own end, or the maximum length of 10."""
    assert end_reason(tokens, at, end_tokens={EOS}, max_length=10) is expected


def test_a_turn_is_matched_to_the_completions_that_it_continues() -> None:
    """In their order; equal ones one after the other."""
    sequences = [[1, 2, 7], [1, 2, 8], [1, 2, 8], [3, 4]]
    assert continued(sequences, [[1, 2, 8, 9], [3, 4, 9]]) == [1, 3]
    assert continued(sequences, [[1, 2, 8, 9], [1, 2, 8, 9]]) == [1, 2]
    assert continued(sequences, []) == []
    with pytest.raises(ValueError, match="continues no completion"):
        continued(sequences, [[3, 4, 9], [1, 2, 8, 9]])


def test_the_last_turn_says_why_a_completion_ended() -> None:
    """One called a tool and was then in a loop, one ended itself, and one came to the maximum after its
    tool.
    """
    rollout = CappedRollout(end_tokens={EOS}, max_length=10)
    first = rollout.end_turn([[2], [3], [4]], [[5, EOS], [6, EOS], [7, EOS]], [None] * 3)
    assert first == [[5, EOS], [6, EOS], [7, EOS]]
    assert rollout.reasons == (EndReason.eos,) * 3
    looped = Cut(length=3, reason=EndReason.repetition)
    second = rollout.end_turn([[2, 5, EOS, 50], [4, 7, EOS, 50, 50]], [[9] * 6, [8] * 10], [looped, None])
    # a cut adds no end-of-sequence token: the trainer takes the completion for unfinished
    assert second == [[9, 9, 9], [8] * 10]
    assert rollout.reasons == (EndReason.repetition, EndReason.eos, EndReason.length)


def test_the_deadline_covers_all_turns() -> None:
    """It begins with the rollout; the number of steps counts those of earlier turns."""
    now = 100.0
    rollout = CappedRollout(end_tokens={EOS}, max_length=10, deadline=Deadline(5, clock=lambda: now))
    assert not rollout.out_of_time(1)
    rollout.steps += 40
    now = 105.0
    assert rollout.out_of_time(2)
    assert rollout.out_of_time(3)
    assert rollout.timed_out_after == 42


def test_a_deadline_is_decided_once() -> None:
    """A rollout that was cut is cut after the same token; one that ended itself is not cut before that, at
    any speed.
    """
    late = Deadline(1, clock=iter([0.0, *[99.0] * 99]).__next__)
    early = Deadline(1000)
    cut = CappedRollout(
        end_tokens={1}, max_length=99, deadline=early, decided=DeadlineDecision(steps=9, timed_out_after=7)
    )
    assert [cut.out_of_time(steps) for steps in (1, 6, 7)] == [False, False, True]
    assert cut.timed_out_after == 7
    ended = CappedRollout(
        end_tokens={1}, max_length=99, deadline=late, decided=DeadlineDecision(steps=9, timed_out_after=None)
    )
    assert [ended.out_of_time(steps) for steps in (1, 9)] == [False, False]
    assert ended.out_of_time(10)  # it has become another rollout


def test_a_journal_with_broken_lines_is_read(tmp_path: Path) -> None:
    """Of several lines of a rollout the newest counts."""
    path = tmp_path / "journal.jsonl"
    assert read_decisions(path, 0, 2) == {}
    record = {
        "event": "rollout_ended", "rank": 0, "world_size": 2, "train_call": 1, "step": 3, "mode": "train",
        "number": 0,
        "decoding_steps": 5, "timed_out_after": 5,
    }  # fmt: skip
    dumps = functools.partial(json.dumps, separators=(",", ":"))
    lines = [
        dumps(record), '{"event":"rollout_ended"',
        dumps(record | {"decoding_steps": 6, "timed_out_after": None}),
        dumps(record | {"rank": 1}), dumps(record | {"step": "x"}), "[1]",
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    assert read_decisions(path, 0, 2) == {
        RolloutKey(1, 3, "train", 0): DeadlineDecision(steps=6, timed_out_after=None)
    }
