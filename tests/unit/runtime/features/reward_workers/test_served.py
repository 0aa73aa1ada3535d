"""What a call in a worker returns, what a failed one means, and what is replayed in the rank. The workers are
real.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import TrainerState

from grpo_run.runtime.event import as_record
from grpo_run.runtime.features.reward_workers import _service as service
from grpo_run.runtime.features.reward_workers._deadlines import CallClock
from grpo_run.runtime.features.reward_workers._host import start
from grpo_run.runtime.features.reward_workers._messages import Failure, Reply, Task
from grpo_run.runtime.features.reward_workers._pool import WorkerPool
from grpo_run.runtime.features.reward_workers._served import ServedRewards
from grpo_run.runtime.features.reward_workers.events import FailureKind, MovedReward
from grpo_run.runtime.features.reward_workers.settings import RankRewards
from grpo_run.runtime.rank.points import Failed
from grpo_run.trainers.rewards import whole_batch
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

PROMPTS = ["1", "2", "bad", "4", "5"]
Reward = Callable[..., Any]


class Rank:
    """A rank whose reward functions run in one worker, and what it has said and written."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        session: Any = SimpleNamespace(
            config=SimpleNamespace(
                of=lambda settings: settings(workers=1, timeout_seconds=1.0), deadlines=DeadlineSettings()
            ),
            journal=SimpleNamespace(write=lambda event: self.events.append(as_record(event))),
            slot=SimpleNamespace(step=6, record_work=lambda: None), rank=0, local_world_size=1,
            is_main=True, is_rank=True, warn=self.said.append,
        )  # fmt: skip
        self.served = ServedRewards(session, start(), RankRewards())
        self.extra: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []

    def wrap(self, function: Reward) -> Reward:
        """Return what a trainer calls."""
        for told in (self.events, self.said, self.extra, self.metrics):
            told.clear()
        return self.served.wrap(function, function.__name__, function)

    def score(self, wrapped: Reward, **columns: Any) -> Any:
        """Call it as TRL does."""
        return wrapped(
            **{
                "prompts": list(PROMPTS), "completions": [f"c{prompt}" for prompt in PROMPTS],
                "answer": list("abcde"),
                "trainer_state": TrainerState(global_step=3, log_history=[{"loss": 1.0}]),
                "log_extra": lambda column, values: self.extra.append((column, values)),
                "log_metric": lambda name, value: self.metrics.append((name, value)), **columns,
            }
        )  # fmt: skip


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.served.close()


def failures(values: list[Any]) -> dict[int, str]:
    """The samples without a reward, and why."""
    return {index: str(value.reason) for index, value in enumerate(values) if isinstance(value, Failed)}


def process(prompts: list[str], **columns: Any) -> list[int]:
    """Return the process that has scored each prompt."""
    return [os.getpid() for _ in prompts]


def test_functions_run_in_a_worker_also_async_ones(rank: Rank) -> None:
    async def later(prompts: list[str], **columns: Any) -> list[int]:
        await asyncio.sleep(0.001)
        return [os.getpid() for _ in prompts]

    for values in (rank.score(rank.wrap(process)), asyncio.run(rank.score(rank.wrap(later)))):
        assert len(set(values)) == 1
        assert os.getpid() not in values


def test_only_functions_that_were_moved_run_in_workers(rank: Rank) -> None:
    """They are known by the place of their code; `*` stands for all."""
    rank.wrap(process)  # starts what runs the calls
    place = MovedReward(file=__file__, function="process")
    for moved, expected in (([place], False), ([MovedReward(function="*")], False), ([], True)):
        session: Any = SimpleNamespace(config=SimpleNamespace(of=lambda settings: settings()))
        host: Any = None
        served = ServedRewards(session, host, RankRewards(moved=tuple(moved)))
        served._service = rank.served._service
        assert (served.wrap(process, "process", process) is process) is expected


def test_a_function_that_raises_on_one_sample_loses_that_one_only(rank: Rank) -> None:
    """Columns are cut as the completions are; what the parts have logged is joined, with None for the
    sample.
    """

    def raises_once(
        prompts: list[str], answer: list[str], log_extra: Any, log_metric: Any, **columns: Any
    ) -> list[float]:
        if "bad" in prompts:
            raise ValueError("bad answer")
        log_extra("answers", list(answer))
        log_metric("parts", 1.0)
        return [float(prompt) for prompt in prompts]

    values = rank.score(rank.wrap(raises_once))
    assert failures(values) == {2: "exception"}
    assert [value for value in values if not isinstance(value, Failed)] == [1.0, 2.0, 4.0, 5.0]
    assert rank.extra == [("answers", ["a", "b", None, "d", "e"])]
    assert rank.metrics == [("parts", 1.0)] * 2
    (event,) = rank.events
    assert (event["rank"], event["step"], event["masked"], event["batch"]) == (0, 7, 1, 5)
    assert event["samples"][0]["index"] == 2
    assert event["samples"][0]["prompt"] == "bad"
    assert "in raises_once\n" in event["traceback"]
    assert len(rank.said) == 1


def test_a_trainer_that_masks_nothing_gets_none_for_a_failure(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minus infinity marks it for the masking, and would otherwise reach the loss."""

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        return [1.0 / (prompt != "bad") for prompt in prompts]

    monkeypatch.setattr(rank.served, "_masked", False)
    assert rank.score(rank.wrap(reward)) == [1.0, 1.0, None, 1.0, 1.0]


def test_a_function_that_raises_everywhere_costs_its_samples(rank: Rank) -> None:
    """Once it is called in the rank as well, where it may find what the script has set up; what it drew there
    does not count. It is said once and written each time.
    """
    calls = []

    def raises(prompts: list[str], **columns: Any) -> list[float]:
        random.random()
        raise ValueError("no")

    def in_rank(**columns: Any) -> Any:
        calls.append(columns)
        return raises(**columns)

    wrapped = rank.served.wrap(raises, "raises", in_rank)
    for told in (rank.events, rank.said):
        told.clear()
    random.seed(7)
    expected = random.random()
    random.seed(7)
    for _ in range(2):
        assert failures(rank.score(wrapped)) == dict.fromkeys(range(5), "exception")
    assert random.random() == expected
    assert [event["masked"] for event in rank.events] == [5, 5]
    assert (len(calls), len(rank.said)) == (1, 1)


def test_a_function_that_raises_in_workers_only_stays_in_the_rank(rank: Rank) -> None:
    """It may need what the script has set up. Nothing is excluded, and nothing reported as failed."""
    pid = os.getpid()

    def in_rank_only(prompts: list[str], **columns: Any) -> list[float]:
        import os

        if os.getpid() != pid:
            raise RuntimeError("open the client first")
        return [1.0 for _ in prompts]

    wrapped = rank.wrap(in_rank_only)
    for _ in range(2):
        assert rank.score(wrapped) == [1.0] * 5
    assert rank.events == []
    reason = "it raised RuntimeError: open the client first in a worker only"
    assert rank.said == [f"reward function in_rank_only stays in the rank: {reason}"]


def test_a_function_of_whole_batches_is_not_called_with_a_part(rank: Rank) -> None:
    @whole_batch
    def ranks(prompts: list[str], **columns: Any) -> list[float]:
        if len(prompts) == 5:
            raise ValueError("no")
        return [0.0 for _ in prompts]

    assert failures(rank.score(rank.wrap(ranks))) == dict.fromkeys(range(5), "exception")


def test_draws_continue_as_if_the_function_had_run_in_the_rank(rank: Rank) -> None:
    def draws(prompts: list[str], **columns: Any) -> list[float]:
        return [random.random() + np.random.rand() + float(torch.rand(())) for _ in prompts]

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    wrapped = rank.wrap(draws)
    seed()
    expected = [*draws(PROMPTS), random.random(), np.random.rand(), float(torch.rand(()))]
    seed()
    assert [*rank.score(wrapped), random.random(), np.random.rand(), float(torch.rand(()))] == expected


def test_the_history_of_logs_does_not_travel(rank: Rank) -> None:
    def reads_state(prompts: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        return [trainer_state.global_step + 10 * len(trainer_state.log_history) for _ in prompts]

    assert rank.score(rank.wrap(reads_state)) == [3] * 5


def test_a_batch_that_returns_in_parts_loses_nothing(rank: Rank) -> None:
    """A call may hang on a whole batch and on none of its samples."""

    def stalls(prompts: list[str], **columns: Any) -> list[int]:
        import time

        if len(prompts) == 5:
            time.sleep(1e6)
        return [len(prompt) for prompt in prompts]

    assert rank.score(rank.wrap(stalls)) == [1, 1, 3, 1, 1]
    assert rank.events[0]["masked"] == 0


def too_slow(
    path: Path, most: int, error: type[Exception] = TimeoutError
) -> tuple[Reward, Callable[[], list[int]]]:
    """A function whose own time limit expires for more than so many samples, and what returns the sizes of
    its calls in workers so far.
    """

    def slow(prompts: list[str], **columns: Any) -> list[float]:
        with open(path, "a") as file:
            print(len(prompts), file=file)
        if len(prompts) > most:
            raise error("3 (of 5) futures unfinished")
        return [1.0 for _ in prompts]

    slow.__name__ = f"slow_{most}_{error.__name__}"
    return slow, lambda: [int(line) for line in path.read_text().split()]


class JudgeTimeoutExpired(Exception):
    """A time limit of the script's own."""


@pytest.mark.parametrize("error", [TimeoutError, JudgeTimeoutExpired])
def test_a_function_that_is_too_slow_for_whole_batches_loses_nothing(
    error: type[Exception], rank: Rank, tmp_path: Path
) -> None:
    """Each batch is searched, and the failure is told once, in the words of the script."""
    slow, sizes = too_slow(tmp_path / "sizes", 2, error)
    wrapped = rank.wrap(slow)
    for _ in range(3):
        assert rank.score(wrapped) == [1.0] * 5
    assert sizes() == [5, 2, 3, 1, 2] * 3
    assert [(event["kind"], event["masked"]) for event in rank.events] == [("timeout", 0)] * 3
    (said,) = rank.said
    assert f"raised {error.__name__}: 3 (of 5) futures unfinished: no sample masked" in said


def test_a_function_whose_time_limit_always_expires_costs_its_samples(rank: Rank, tmp_path: Path) -> None:
    """It is not tried in the rank, where it might hang."""
    slow, sizes = too_slow(tmp_path / "sizes", 0)
    wrapped = rank.wrap(slow)
    for _ in range(3):
        assert failures(rank.score(wrapped)) == dict.fromkeys(range(5), "timeout")
    assert sizes() == [5, 2, 1, 1, 3, 1, 2, 1, 1] * 3


class Criteria:
    """Several rewards of one object."""

    def first(self, prompts: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in prompts]

    def second(self, prompts: list[str], **columns: Any) -> list[float]:
        return [2.0 for _ in prompts]


def test_two_methods_of_one_object_run_in_workers(rank: Rank) -> None:
    """Loading the second sets the attributes of their class again, which is no change by the first."""
    both = Criteria()
    wrapped = [rank.wrap(both.first), rank.wrap(both.second)]
    for _ in range(2):
        assert [rank.score(one) for one in wrapped] == [[1.0] * 5, [2.0] * 5]
    assert rank.said == []


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


def asks_for_the_group(prompts: list[str], **columns: Any) -> list[float]:
    try:
        torch.distributed.is_initialized()
    except BaseException:  # noqa: BLE001 - it handles everything
        return [1.0 for _ in prompts]
    return [0.0 for _ in prompts]


@pytest.mark.parametrize(
    ("function", "columns", "reason"),
    [
        (rebinds_a_variable, {}, "changes its own state"),
        (opens_a_client, {}, "changes its own state"),
        (strips, {}, "changes the columns that it is given"),
        (asks_for_the_group, {}, "uses torch's process group"),
        (process, {"environments": [0] * 5}, "takes environments, which exist only in the rank"),
        (process, {"images": [bytes(65 * 2**20)]}, "gets more than 64 MiB in one call"),
    ],
)
def test_what_needs_the_rank_stays_there(
    function: Any, columns: dict[str, Any], reason: str, rank: Rank
) -> None:
    """A worker that is replaced would forget changes, and the functions after it are given the same lists. It
    is said once.
    """
    wrapped = rank.wrap(function)
    for _ in range(2):
        assert set(rank.score(wrapped, **columns)) <= {0.0, os.getpid()}
    assert rank.said == [f"reward function {function.__name__} stays in the rank: it {reason}"]


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, iter])
def test_numbers_are_returned_as_a_list(make: Any, rank: Rank) -> None:
    """Also NaN: what it means is decided where rewards are combined."""

    def returns(prompts: list[str], **columns: Any) -> Any:
        return make([0.25, math.nan, 1.0, 2.0, 3.0])

    values = rank.score(rank.wrap(returns))
    assert [type(value) for value in values] == [float] * 5
    assert math.isnan(values[1])
    assert values[2:] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned NoneType instead of a list of 5 rewards"),
        (1.0, "returned float instead of a list of 5 rewards"),
        ([1.0], "returned 1 rewards, but 5 were expected, one per completion"),
    ],
)
def test_another_number_of_rewards_is_a_failure(output: Any, message: str, rank: Rank) -> None:
    @whole_batch
    def returns(prompts: list[str], **columns: Any) -> Any:
        return output

    assert failures(rank.score(rank.wrap(returns))) == dict.fromkeys(range(5), "output")
    assert rank.events[0]["message"] == message


class PureWorkers(WorkerPool):
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


def searched(rank: Rank, samples: int, bad: set[int]) -> tuple[list[Any], PureWorkers]:
    wrapped, workers = rank.wrap(strips), PureWorkers(set(map(str, bad)))
    prompts = [str(number) for number in range(samples)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.served._service, "_pool", workers)
        values = rank.score(wrapped, prompts=prompts, completions=prompts, answer=prompts)
    return values, workers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_exactly_the_samples_that_a_function_fails_on_lose_their_rewards(
    rank: Rank, case: tuple[int, set[int]]
) -> None:
    """Each for the reason of its own call; every other one is scored once, from left to right."""
    samples, bad = case
    values, workers = searched(rank, samples, bad)
    assert failures(values).keys() == bad
    scored = [prompt for part in workers.parts if not workers.bad.intersection(part) for prompt in part]
    assert scored == [str(number) for number in range(samples) if number not in bad]
    for event in rank.events:
        assert all(one["message"] == str(one["index"]) for one in event["samples"])


def test_one_sample_is_found_in_few_calls(rank: Rank) -> None:
    """The batch, and two parts for each time that it can be halved; a batch of one is not called again."""
    assert len(searched(rank, 64, {37})[1].parts) == 13
    assert len(searched(rank, 1, {0})[1].parts) == 1


def test_samples_that_are_not_reached_in_time_are_lost(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reason of their own."""
    monkeypatch.setattr(service, "BISECTION_SECONDS", 0.0)
    values, workers = searched(rank, 8, {7})
    assert failures(values) == dict.fromkeys(range(8), "not_tried")
    assert len(workers.parts) == 1
