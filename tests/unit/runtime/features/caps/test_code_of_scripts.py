"""Caps on what a script's own code generates: in a `rollout_func`, and in a hand-written loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.planted import cycle, planted

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._capping import Capping
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._rollout import CappedRollout, DeadlineDecision
from grpo_run.runtime.features.caps.rank import PART
from grpo_run.runtime.features.caps.settings import CapsSettings
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.rollouts import generate_calls
from grpo_run.trainers import consensus

PAD, EOS, LOOP, END, LONG = 0, 1, 2, 10, 20
"""The last three are prompts: a loop of two tokens, an end after five, and no end."""
LONGEST = 40
generate_calls.install()


def model() -> Any:
    """The model of the three prompts."""
    successors = cycle([LOOP, LOOP + 1], 200)
    for token in (*range(END, END + 4), *range(LONG, 199)):
        successors[token] = token + 1
    successors[END + 4] = EOS
    return planted(successors, pad=PAD, eos=EOS)


def generated(rows: list[int]) -> list[list[int]]:
    """Completions of these prompts by one call of transformers' `generate`."""
    ids = torch.tensor(rows)[:, None]
    found = model().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONGEST
    )
    completions: list[list[int]] = found[:, 1:].tolist()
    return completions


def in_one_call(prompts: list[int], trainer: Any) -> dict[str, Any]:
    """Padding after an end-of-sequence token is left out, as such functions do."""
    rows = [row[: row.index(EOS) + 1] if EOS in row else row for row in generated(prompts)]
    return output(prompts, rows)


def in_a_call_each(prompts: list[int], trainer: Any) -> dict[str, Any]:
    return output(prompts, [generated([prompt])[0] for prompt in prompts])


def in_a_loop_of_ranks(prompts: list[int], trainer: Any) -> dict[str, Any]:
    """It ends after a thousand tokens, of which it returns the first."""
    tokens: list[int] = []
    for _ in consensus.while_any(lambda: len(tokens) < 1000):
        tokens.append(LOOP)
    return output(prompts, [tokens for _ in prompts])


def in_a_loop(prompts: list[int], trainer: Any) -> dict[str, Any]:
    return output(prompts, [[LOOP] * 3 for _ in prompts])


def output(prompts: list[int], rows: list[list[int]]) -> dict[str, Any]:
    """What TRL wants, with a value of the function's own."""
    return {
        "prompt_ids": [[prompt] for prompt in prompts],
        "completion_ids": rows,
        "logprobs": [[-1.0] * len(row) for row in rows],
        "own": "kept",
    }


class Trainer:
    """What a trainer with a `rollout_func` needs for the caps."""

    max_completion_length = LONGEST
    eos_token_ids = (EOS,)
    _tokenizer = SimpleNamespace(pad_token_id=PAD)

    def __init__(self, rollout_func: Callable[..., Any]) -> None:
        self.rollout_func = rollout_func

    def _generate(self, prompts: list[int]) -> Any:
        return self.rollout_func(prompts, self)

    def _generate_single_turn(self) -> None:
        raise AssertionError("TRL does not call it")


def rollout(
    function: Callable[..., Any], settings: CapSettings, monkeypatch: pytest.MonkeyPatch, **keywords: Any
) -> tuple[dict[str, Any], list[str]]:
    """Generate for the three prompts; return what the trainer gets, and why completions ended."""
    module = "grpo_run.runtime.features.caps._capping"
    monkeypatch.setattr(f"{module}.is_available", lambda feature, trainer: True)
    trainer = Trainer(function)
    capping = Capping(trainer, settings, **keywords)
    with capping.applied():
        found = trainer._generate([LOOP, END, LONG])
    assert trainer.rollout_func is function
    return found, [reason.value for reason in capping.end_reasons() or ()]


@pytest.mark.parametrize("function", [in_one_call, in_a_call_each])
def test_a_rollout_func_that_calls_generate_is_capped(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding after a completion that a cap has ended is left out; every other one is as it was."""
    found, reasons = rollout(function, CapSettings(repetition=16), monkeypatch)
    plain = function([LOOP, END, LONG], None)
    assert reasons == ["repetition", "eos", "length"]
    looped = found["completion_ids"][0]
    assert 16 <= len(looped) <= 3 * 2 + 16
    assert looped == plain["completion_ids"][0][: len(looped)]
    assert [len(row) for row in found["logprobs"]] == [len(row) for row in found["completion_ids"]]
    assert found["completion_ids"][1:] == plain["completion_ids"][1:]
    assert found["own"] == "kept"


@pytest.mark.parametrize("function", [in_one_call, in_a_call_each, in_a_loop_of_ranks])
def test_a_rollout_func_is_ended_in_time_and_at_the_same_token_again(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes one second a look. In a later attempt the clock does not count."""
    reports: list[CappedRollout] = []
    settings, seconds = CapSettings(max_time=9.0), iter(range(10_000))
    found, _ = rollout(
        function, settings, monkeypatch, clock=lambda: float(next(seconds)), report=reports.append
    )
    (first,) = reports
    assert first.timed_out_after is not None
    assert sum(map(len, found["completion_ids"])) < 60
    decided = DeadlineDecision(steps=first.steps, timed_out_after=first.timed_out_after)
    again, _ = rollout(function, settings, monkeypatch, clock=lambda: 0.0, decided=lambda: decided)
    assert again == found


@pytest.mark.parametrize(
    ("function", "settings", "line"),
    [
        (in_a_loop, CapSettings(repetition=16), "repetition: .* `rollout_func` does not call"),
        (in_a_loop_of_ranks, CapSettings(repetition=16), "repetition: .* its tokens are not seen"),
        (in_a_loop, CapSettings(max_time=9.0), "max_time: .* `rollout_func` neither calls"),
    ],
)
def test_what_cannot_be_capped_is_refused_in_one_line(
    function: Callable[..., Any], settings: CapSettings, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first rollout."""
    with pytest.raises(ConfigError, match=line) as caught:
        rollout(function, settings, monkeypatch)
    assert "\n" not in str(caught.value)


class Loop:
    """A hand-written loop under the caps of a command line."""

    def __init__(self, session: Any, monkeypatch: pytest.MonkeyPatch, **caps: float) -> None:
        config = SimpleNamespace(
            of=lambda settings: CapsSettings(generation=caps), run_directory=session.config.run_directory
        )
        monkeypatch.setattr(session, "config", config)
        self.said: list[str] = []
        monkeypatch.setattr(session, "warn", self.said.append)
        self.hooks = ExitStack()
        self.points = CallPoints(train_call=1, hooks=self.hooks)
        PART.call(session, self.points)

    def step(self, generate: Callable[[], Any]) -> Any:
        """Take a step in which this is generated."""
        found = generate()
        for ends in self.points.step_ends:
            ends(1)
        return found


def test_a_hand_written_loop_is_capped(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `generate`, until the loop ends."""
    loop = Loop(session, monkeypatch, repetition=16)
    for _ in range(2):
        looped, ended, _ = loop.step(lambda: generated([LOOP, END, LONG]))
        assert looped[30:] == [PAD] * (LONGEST - 30)
        assert ended[:5] == [*range(END + 1, END + 5), EOS]
    assert loop.said == []
    loop.hooks.close()
    assert generated([LOOP])[0][30:] == [LOOP + 1, LOOP] * 5


def test_a_loop_of_ranks_ends_in_time_and_as_late_again(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was decided is in the journal of the run."""
    module = "grpo_run.runtime.features.caps._loop"
    took = []
    for clock in (iter(range(10_000)), iter([0] * 10_000)):
        now = clock
        monkeypatch.setattr(
            f"{module}.Deadline",
            lambda seconds: SimpleNamespace(passed=lambda: next(now) >= seconds),  # noqa: B023
        )
        loop = Loop(session, monkeypatch, max_time=9.0)
        turns = loop.step(lambda: sum(1 for _ in consensus.while_any(lambda: True)))
        took.append(turns)
        loop.hooks.close()
    assert took == [9, 9]


def test_each_loop_of_a_step_ends_as_late_again(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step generates several times."""
    took = []
    for limits in ((4, 9), (50, 50)):
        answers = iter([asked == limit for limit in limits for asked in range(1, limit + 1)])
        deadline = SimpleNamespace(passed=functools.partial(next, answers))
        monkeypatch.setattr("grpo_run.runtime.features.caps._loop.Deadline", lambda _: deadline)  # noqa: B023
        loop = Loop(session, monkeypatch, max_time=9.0)
        took.append(loop.step(lambda: [sum(1 for _ in consensus.while_any(lambda: True)) for _ in "12"]))
        loop.hooks.close()
    assert took == [[3, 8], [3, 8]]


def test_what_a_loop_does_not_show_is_said_once(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first step."""
    loop = Loop(session, monkeypatch, repetition=16, max_completion_length=9)
    for _ in range(2):
        loop.step(lambda: None)
    assert loop.said == [
        "--generation max_completion_length: a hand-written loop has no configuration of TRL's",
        (
            "--generation repetition: the first step of loop 1 does not call transformers' `generate`, and"
            " its tokens are not seen; remove the cap, and use grpo_run.trainers.caps.Repetition in its loop"
        ),
    ]
    loop.hooks.close()
