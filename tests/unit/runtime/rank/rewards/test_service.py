"""What a failed call means: which samples lose their reward, and what is replayed in the rank. The workers
are real.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import TrainerState

from grpo_run.runtime.event import as_record
from grpo_run.runtime.history.rewards import FailureKind
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.rank.points import Failed
from grpo_run.runtime.rank.rewards import host
from grpo_run.runtime.rank.rewards._deadlines import CallClock, Learned
from grpo_run.runtime.rank.rewards._failures import FailureLog
from grpo_run.runtime.rank.rewards._messages import Failure, Reply, Task
from grpo_run.runtime.rank.rewards._service import MovedFunction, RewardService
from grpo_run.trainers.rewards import whole_batch

PROMPTS = ["1", "2", "bad", "4", "5"]


class Serving:
    """A service, and what it has said and written."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        config = RunConfig(
            run_id="r", run_directory=Path(), target="t", module=False, arguments=(), command=(),
            reward_timeout_seconds=1.0,
        )  # fmt: skip
        self.service = RewardService(
            host.start(), config, earlier=None, workers=1, memory_limit_bytes=2**32,
            log=FailureLog(lambda event: self.events.append(as_record(event)),
            self.said.append),
            warn=self.said.append, on_waiting=lambda: None,
        )  # fmt: skip
        self.extra: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []

    def add(self, function: Callable[..., Any]) -> MovedFunction:
        self.events.clear()
        self.said.clear()
        self.extra.clear()
        self.metrics.clear()
        (moved,) = self.service.add([(function, function.__name__)])
        return moved

    def score(self, moved: MovedFunction, **columns: Any) -> list[Any] | None:
        return self.service.score(
            moved,
            {
                "prompts": PROMPTS, "completions": [f"c{prompt}" for prompt in PROMPTS],
                "answer": list("abcde"),
                "trainer_state": TrainerState(global_step=3, log_history=[{"loss": 1.0}]),
                "log_extra": lambda column, values: self.extra.append((column, values)),
                "log_metric": lambda name, value: self.metrics.append((name, value)), **columns,
            },
        )  # fmt: skip


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.service.close()


def test_a_function_that_raises_on_one_sample_loses_that_one_only(serving: Serving) -> None:
    """Columns are cut as the completions are; what the parts have logged is joined, with None for the
    sample.
    """

    def reward(
        prompts: list[str], answer: list[str], log_extra: Any, log_metric: Any, **columns: Any
    ) -> list[float]:
        if "bad" in prompts:
            raise ValueError("bad answer")
        log_extra("answers", list(answer))
        log_metric("parts", 1.0)
        return [float(prompt) for prompt in prompts]

    values = serving.score(serving.add(reward))
    assert values is not None
    assert [value for value in values if not isinstance(value, Failed)] == [1.0, 2.0, 4.0, 5.0]
    assert isinstance(values[2], Failed)
    assert values[2].reason == "exception"
    assert serving.extra == [("answers", ["a", "b", None, "d", "e"])]
    (event,) = serving.events
    assert (event["masked"], event["batch"]) == (1, 5)
    assert event["samples"][0]["index"] == 2
    assert event["samples"][0]["prompt"] == "bad"
    assert "in reward\n" in event["traceback"]
    assert len(serving.said) == 1


def test_a_failure_is_said_once_and_written_each_time(serving: Serving) -> None:
    def fails(prompts: list[str], **columns: Any) -> list[float]:
        raise ValueError("always")

    moved = serving.add(fails)
    moved.was_tried = True  # in the rank
    for _ in range(2):
        values = serving.score(moved)
        assert values is not None
        assert all(isinstance(value, Failed) for value in values)
    assert (len(serving.events), len(serving.said)) == (2, 1)


def test_a_function_of_whole_batches_is_not_called_with_a_part(serving: Serving) -> None:
    @whole_batch
    def ranks(prompts: list[str], **columns: Any) -> list[float]:
        if len(prompts) == 5:
            raise ValueError("no")
        return [0.0 for _ in prompts]

    moved = serving.add(ranks)
    moved.was_tried = True  # in the rank
    values = serving.score(moved)
    assert values is not None
    assert all(isinstance(value, Failed) for value in values)


def test_draws_continue_as_if_the_function_had_run_in_the_rank(serving: Serving) -> None:
    """Also after a search: the parts that passed have drawn in turn."""

    def draws(prompts: list[str], **columns: Any) -> list[float]:
        return [random.random() + float(torch.rand(())) for _ in prompts]

    moved = serving.add(draws)
    random.seed(5)
    torch.manual_seed(5)
    expected = [*draws(PROMPTS), random.random(), float(torch.rand(()))]
    random.seed(5)
    torch.manual_seed(5)
    values = serving.score(moved)
    assert values is not None
    assert [*values, random.random(), float(torch.rand(()))] == expected


def test_the_history_of_logs_does_not_travel(serving: Serving) -> None:
    def reads_state(prompts: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        return [trainer_state.global_step + 10 * len(trainer_state.log_history) for _ in prompts]

    assert serving.score(serving.add(reads_state)) == [3] * 5


def test_a_function_that_gets_environments_stays_in_the_rank(serving: Serving) -> None:
    def plays(prompts: list[str], **columns: Any) -> list[float]:
        return [0.0 for _ in prompts]

    moved = serving.add(plays)
    assert serving.score(moved, environments=[object()] * 5) is None
    assert serving.score(moved) is None
    assert serving.said == [
        "reward function plays stays in the rank: it takes environments, which exist only in the rank"
    ]


def test_a_batch_that_returns_in_parts_loses_nothing(serving: Serving) -> None:
    """A call may hang on a whole batch and on none of its samples."""

    def stalls(prompts: list[str], **columns: Any) -> list[int]:
        import time

        if len(prompts) == 5:
            time.sleep(1e6)
        return [len(prompt) for prompt in prompts]

    assert serving.score(serving.add(stalls)) == [1, 1, 3, 1, 1]
    assert serving.events[0]["masked"] == 0


class Criteria:
    """Several rewards of one object."""

    def first(self, prompts: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in prompts]

    def second(self, prompts: list[str], **columns: Any) -> list[float]:
        return [2.0 for _ in prompts]


def test_two_methods_of_one_object_run_in_workers(serving: Serving) -> None:
    """Loading the second sets the attributes of their class again, which is no change by the first."""
    both = Criteria()
    moved = [serving.add(both.first), serving.add(both.second)]
    for _ in range(2):
        assert [serving.score(one) for one in moved] == [[1.0] * 5, [2.0] * 5]
    assert [one.stays for one in moved] == ["", ""]


def test_a_function_that_raises_in_workers_only_stays_in_the_rank(serving: Serving) -> None:
    """It may need what the script has set up. Nothing is excluded, and nothing reported as failed."""
    rank = os.getpid()

    def in_rank_only(prompts: list[str], **columns: Any) -> list[float]:
        import os

        if os.getpid() != rank:
            raise RuntimeError("open the client first")
        return [1.0 for _ in prompts]

    moved = serving.add(in_rank_only)
    assert serving.score(moved) is None
    with moved.tried() as excluded:
        assert in_rank_only(PROMPTS) == [1.0] * 5
    assert excluded == []
    assert serving.score(moved) is None
    assert serving.events == []
    assert serving.said == [
        (
            "reward function in_rank_only stays in the rank: it raised RuntimeError: open the client first in a"  # noqa: E501
            " worker only"
        )
    ]


def test_a_function_that_raises_everywhere_costs_its_samples(serving: Serving) -> None:
    """The one call in the rank raises as well; what it drew there does not count."""

    def raises(prompts: list[str], **columns: Any) -> list[float]:
        random.random()
        raise ValueError("no")

    moved = serving.add(raises)
    assert serving.score(moved) is None
    random.seed(7)
    expected = random.random()
    random.seed(7)
    with moved.tried() as excluded:
        raises(PROMPTS)
    assert [type(value) for value in excluded] == [Failed] * 5
    assert random.random() == expected
    assert [event["masked"] for event in serving.events] == [5]
    assert len(serving.score(moved) or ()) == 5


calls, client = 0, None


def rebinds_a_variable(prompts: list[str], **columns: Any) -> list[float]:
    global calls
    calls += 1
    return [0.0 for _ in prompts]


def opens_a_client(prompts: list[str], **columns: Any) -> list[float]:
    global client
    client = open(os.devnull)  # noqa: SIM115 - cannot be pickled afterwards
    return [0.0 for _ in prompts]


def strips(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    completions[:] = [one.strip("c") for one in completions]
    return [0.0 for _ in prompts]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (rebinds_a_variable, "changes its own state"),
        (opens_a_client, "changes its own state"),
        (strips, "changes the columns that it is given"),
    ],
)
def test_a_function_that_changes_what_it_has_or_is_given_stays_in_the_rank(
    function: Any, reason: str, serving: Serving
) -> None:
    """A worker that is replaced would forget it; and the functions after it are given the same lists."""
    assert serving.score(serving.add(function)) is None
    assert serving.said == [f"reward function {function.__name__} stays in the rank: it {reason}"]


class PureWorkers:
    """Stands for the pool: fails on samples that are known, and notes the parts that it is given."""

    def __init__(self, bad: set[str]) -> None:
        self.bad = bad
        self.parts: list[list[str]] = []

    def call(self, task: Task, clock: CallClock) -> Reply:
        prompts = pickle.loads(task.arguments)["prompts"]
        self.parts.append(prompts)
        if failing := self.bad.intersection(prompts):
            failure = Failure(kind=FailureKind.died, message=" ".join(sorted(failing)))
            return Reply(failure=failure)
        values = [float(prompt) for prompt in prompts]
        return Reply(values=values, generators=task.generators)

    def refresh(self) -> None:
        """There is nothing to end."""


def searched(serving: Serving, samples: int, bad: set[int]) -> tuple[list[Any], PureWorkers]:
    moved, workers = serving.add(strips), PureWorkers(set(map(str, bad)))
    prompts = [str(number) for number in range(samples)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving.service, "_pool", workers)
        values = serving.score(moved, prompts=prompts, completions=prompts, answer=prompts)
    assert values is not None
    return values, workers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_exactly_the_samples_that_a_function_fails_on_lose_their_rewards(
    serving: Serving, case: tuple[int, set[int]]
) -> None:
    """Each for the reason of its own call; every other one is scored once, from left to right."""
    samples, bad = case
    values, workers = searched(serving, samples, bad)
    assert {number for number, value in enumerate(values) if isinstance(value, Failed)} == bad
    scored = [prompt for part in workers.parts if not workers.bad.intersection(part) for prompt in part]
    assert scored == [str(number) for number in range(samples) if number not in bad]
    for event in serving.events:
        assert all(one["message"] == str(one["index"]) for one in event["samples"])


def test_one_sample_is_found_in_few_calls(serving: Serving) -> None:
    """The batch, and two parts for each time that it can be halved; a batch of one is not called again."""
    assert len(searched(serving, 64, {37})[1].parts) == 13
    assert len(searched(serving, 1, {0})[1].parts) == 1


def test_samples_that_are_not_reached_in_time_are_lost(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reason of their own."""
    monkeypatch.setattr(Learned, "bisection_seconds", lambda *_: 0.0)
    values, workers = searched(serving, 8, {7})
    assert [value.reason for value in values] == ["not_tried"] * 8
    assert len(workers.parts) == 1
