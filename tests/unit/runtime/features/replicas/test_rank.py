"""What is compared, when, and what follows; over ranks in threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vote_groups import run_ranks, thread_votes

from grpo_run.runtime.event import as_record
from grpo_run.runtime.features.replicas.rank import PART
from grpo_run.runtime.features.replicas.settings import Difference, RankReplicas, ReplicaSettings
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.vote import to_bits


class Rank:
    """One rank of a call, with a model of two tensors."""

    def __init__(self, rank: int, votes: Any, told: RankReplicas | None = None, layout: str = "ddp") -> None:
        self.journal: list[dict[str, Any]] = []
        self.warned: list[str] = []
        self.model = torch.nn.Linear(4, 4)
        torch.nn.init.ones_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        session: Any = SimpleNamespace(
            rank=rank, is_main=rank == 0, world_size=8, votes=votes, warn=self.warned.append,
            warn_in_journal=self.warned.append,
            settings=SimpleNamespace(features={PART.name: (told or RankReplicas()).model_dump(mode="json")}),
            config=SimpleNamespace(of=lambda kind: ReplicaSettings(every=10)),
            journal=SimpleNamespace(write=lambda event: self.journal.append(as_record(event))),
        )  # fmt: skip
        trainer = SimpleNamespace(state=SimpleNamespace(save_steps=25), optimizer=None)
        facts: Any = SimpleNamespace(layout=layout)
        self.points = CallPoints(
            train_call=1, trainer=trainer, facts=facts, models=[self.model], hooks=ExitStack()
        )
        PART.call(session, self.points)

    def step(self, number: int, norm: float | None = None) -> None:
        """End a step."""
        self.points.norm = norm
        for ends in self.points.step_ends:
            ends(number)
        self.points.norm = None

    def flip(self, position: int = 0) -> None:
        """Change a bit of one element."""
        self.model.weight.data.reshape(-1).view(torch.int32)[position] ^= 1 << 22


@pytest.fixture
def make_ranks() -> Callable[..., list[Rank]]:
    """Makes the ranks of a call."""

    def make(count: int = 2, *given: Any, **named: Any) -> list[Rank]:
        return [Rank(rank, votes, *given, **named) for rank, votes in enumerate(thread_votes(count))]

    return make


def together(ranks: list[Rank], *steps: int) -> None:
    """Let all ranks end the same steps."""
    for step in steps:
        with_norms(ranks, step, *[None] * len(ranks))


def with_norms(ranks: list[Rank], step: int, *norms: float | None) -> None:
    """Let all ranks end a step with these norms of their gradients, and vote on it."""
    run_ranks(*(functools.partial(rank.step, step, norm) for rank, norm in zip(ranks, norms, strict=True)))
    numbers = {rank.points.common for rank in ranks}
    for rank in ranks:
        rank.points.agreed = rank.points.common if len(numbers) == 1 else None


def test_equal_ranks_go_on_and_are_compared_seldom(make_ranks: Callable[..., list[Rank]]) -> None:
    """Every so many steps, and when the script saves."""
    ranks = make_ranks()
    together(ranks, *range(1, 51))
    assert [rank.points.alarm for rank in ranks] == [None, None]
    (event,) = ranks[0].journal
    assert (event["event"], event["tensors"], event["excluded"]) == ("replicas_compared", 2, 0)
    assert ranks[0].points.state()["replicas"]["agreed"] == 50
    votes: Any = ranks[1].points.step_ends[0].__self__._session.votes  # type: ignore[attr-defined]
    assert votes.count == 6  # 10, 20, 25, 30, 40, 50


def test_a_rank_that_differs_ends_the_attempt_on_all(make_ranks: Callable[..., list[Rank]]) -> None:
    """With what the supervisor needs to go back, and to name the rank later."""
    ranks = make_ranks()
    together(ranks, 10)
    ranks[1].flip(5)
    together(ranks, 20)
    alarms = [rank.points.alarm for rank in ranks]
    assert alarms[0] == alarms[1]
    assert alarms[0] is not None
    assert alarms[0].sentence == (
        "The ranks hold different values of 1 tensor after step 20, first of weight; they were equal after"
        " step 10."
    )
    found = Difference.model_validate(alarms[0].details)
    assert (found.agreed, found.name, found.position, found.ranks) == (10, "weight", 5, ())


def test_norms_that_differ_end_the_attempt_in_the_next_step(make_ranks: Callable[..., list[Rank]]) -> None:
    """Where the weights have got what the gradients had; the repetition looks at the same step."""
    ranks = make_ranks()
    together(ranks, 10)
    with_norms(ranks, 11, 0.5, 0.5)
    with_norms(ranks, 12, 0.5, 0.7)
    ranks[1].flip()
    assert [rank.points.alarm for rank in ranks] == [None, None]
    with_norms(ranks, 13, 0.5, 0.5)
    alarm = ranks[0].points.alarm
    assert alarm is not None
    found = Difference.model_validate(alarm.details)
    assert (found.step, found.agreed, found.name) == (13, 10, "weight")
    ranks = make_ranks(2, RankReplicas(differences=(found,), open=(found,)))
    together(ranks, 10, 11, 12, 13)
    assert [list(event["ranks"]) for event in ranks[0].journal if event["event"] == "replica_named"] == [[1]]


@pytest.mark.parametrize("before", [(), (0.5,), (0.0, 0.5, 0.5)])
def test_norms_of_ranks_that_hold_the_same_are_their_own(
    before: tuple[float, ...], make_ranks: Callable[..., list[Rank]]
) -> None:
    """From the first on, or later, as where a trainer does not reduce them; it is said once."""
    ranks = make_ranks()
    for step, norm in enumerate(before, 1):
        with_norms(ranks, step, norm, norm)
    for step in range(len(before) + 1, 40):
        with_norms(ranks, step, 0.5, 0.5 + step)
    assert [rank.points.alarm for rank in ranks] == [None, None]
    assert ranks[0].warned == ["norms of the gradients differ between ranks: they are not compared"]
    assert ranks[0].points.common == 0
    ranks[1].flip()
    together(ranks, 40)
    assert all(rank.points.alarm is not None for rank in ranks)


def test_norms_that_are_no_numbers_are_not_compared(make_ranks: Callable[..., list[Rank]]) -> None:
    """A learning guard ends such a run; 0 says nothing, and DeepSpeed has -1."""
    (rank,) = make_ranks(1)
    for norm in (None, float("nan"), float("inf"), 0.0, -1.0):
        rank.step(1, norm)
        assert rank.points.common == 0
    rank.step(1, 0.5)
    assert 0 < rank.points.common < 1 << 63


def test_a_majority_names_the_rank(make_ranks: Callable[..., list[Rank]]) -> None:
    """Of three ranks and more."""
    ranks = make_ranks(3)
    together(ranks, 10)
    ranks[2].flip()
    together(ranks, 20)
    assert all(rank.points.alarm is not None for rank in ranks)
    assert ranks[0].points.alarm is not None
    assert ranks[0].points.alarm.details["ranks"] == [2]


def test_what_is_a_ranks_own_is_never_compared(make_ranks: Callable[..., list[Rank]]) -> None:
    """It differs at the first comparison; one line says so, and a checkpoint remembers it."""
    ranks = make_ranks()
    ranks[1].flip()
    together(ranks, 10)
    assert ranks[0].warned == ["1 of 2 tensors differ between ranks, first weight: they are not compared"]
    resumed = make_ranks()
    for before, after in zip(ranks, resumed, strict=True):
        after.points.load(before.points.state())
    resumed[0].flip()
    together(resumed, 20)
    assert [rank.points.alarm for rank in resumed] == [None, None]
    with torch.no_grad():
        resumed[0].model.bias += 1
    together(resumed, 30)
    assert all(rank.points.alarm is not None for rank in resumed)


def test_ranks_with_models_of_their_own_are_not_compared(make_ranks: Callable[..., list[Rank]]) -> None:
    """As stages of a pipeline."""
    ranks = make_ranks()
    del ranks[1].model.bias
    together(ranks, 10, 20)
    assert [rank.points.alarm for rank in ranks] == [None, None]
    assert ranks[0].journal[0]["tensors"] == 0


def test_a_tensor_that_cannot_be_read_ends_the_comparisons(make_ranks: Callable[..., list[Rank]]) -> None:
    """On all ranks; the run goes on, and the metric stays 0."""
    ranks = make_ranks()
    ranks[1].model.bias = torch.nn.Parameter(torch.zeros(4).to_sparse())
    together(ranks, 10, 20)
    assert [rank.points.alarm for rank in ranks] == [None, None]
    assert "parameters are not compared: " in ranks[1].warned[0]
    assert ranks[0].journal == []


def test_a_repetition_names_the_rank_that_was_wrong(make_ranks: Callable[..., list[Rank]]) -> None:
    """By the value of one element after the same step."""
    earlier = Difference(
        train_call=1, step=20, agreed=10, count=1, name="weight", position=5, ranks=(),
        bits=(to_bits(7.0), to_bits(1.0)),
    )  # fmt: skip
    ranks = make_ranks(2, RankReplicas(differences=(earlier,), open=(earlier,)))
    together(ranks, 10, 20, 30)
    (named,) = [event for event in ranks[0].journal if event["event"] == "replica_named"]
    assert (named["step"], list(named["ranks"])) == (20, [0])
    assert ranks[0].warned == ["the exact repetition of step 20 shows rank 0 computed wrongly"]


def test_a_difference_that_an_exact_repetition_gives_again_is_the_scripts(
    make_ranks: Callable[..., list[Rank]],
) -> None:
    """As of local SGD; the run goes on, also when it comes to the step a third time."""
    ranks = make_ranks()
    together(ranks, 10)
    ranks[1].flip(5)
    together(ranks, 20)
    assert ranks[0].points.alarm is not None
    found = Difference.model_validate(ranks[0].points.alarm.details)
    for open_ in ((found,), ()):
        ranks = make_ranks(2, RankReplicas(differences=(found,), open=open_))
        together(ranks, 10)
        ranks[1].flip(5)
        together(ranks, 20)
        ranks[1].flip(6)
        together(ranks, 30)
        assert [rank.points.alarm for rank in ranks] == [None, None]
        assert [event["event"] for event in ranks[0].journal][-1] == "replica_named"
        assert "1 tensor, first weight, is compared no longer" in ranks[0].warned[0]
        with torch.no_grad():
            ranks[0].model.bias += 1
        together(ranks, 40)
        assert all(rank.points.alarm is not None for rank in ranks)


def test_the_same_rank_that_is_wrong_again_is_not_the_script(make_ranks: Callable[..., list[Rank]]) -> None:
    """A majority shows that it is alone."""
    differences: tuple[Difference, ...] = ()
    for _ in range(2):
        ranks = make_ranks(3, RankReplicas(differences=differences))
        together(ranks, 10)
        ranks[2].flip()
        together(ranks, 20)
        assert ranks[0].points.alarm is not None
        differences = (Difference.model_validate(ranks[0].points.alarm.details),)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "deepspeed-zero3", "tensor-parallel"])
def test_what_is_spread_over_ranks_has_no_second_copy(
    layout: str, make_ranks: Callable[..., list[Rank]]
) -> None:
    """Nothing is called at a step."""
    (rank,) = make_ranks(1, layout=layout)
    assert rank.points.step_ends == []
