"""The vote group: votes, collective decisions, and the order they require."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.vote_groups import run_ranks

from grpo_run.trainers.rank.vote import Flags, Vote
from grpo_run.trainers.rank.vote_group import VoteGroup


@pytest.fixture
def alone() -> VoteGroup:
    """A group of one rank, without a store."""
    return VoteGroup(None, rank=0, world_size=1, prefix="test")


def test_a_single_rank_votes_without_a_store(alone: VoteGroup) -> None:
    """Its own vote is the result."""
    alone.start(Vote(step=3, flags=Flags(save=True)))
    result = alone.collect()
    assert result is not None
    assert (result.step, result.flags) == (3, Flags(save=True))
    assert alone.votes == 1


def test_collect_without_a_vote_returns_none(alone: VoteGroup) -> None:
    """This holds before the first vote and after each collected one."""
    assert alone.collect() is None
    alone.start(Vote(step=1))
    alone.collect()
    assert alone.collect() is None
    assert alone.votes == 1


def test_starting_a_second_vote_is_a_bug(alone: VoteGroup) -> None:
    """The first one's result would be lost."""
    alone.start(Vote(step=1))
    with pytest.raises(AssertionError, match="in progress"):
        alone.start(Vote(step=2))


def test_a_maximum_during_a_vote_is_a_bug(alone: VoteGroup) -> None:
    """Ranks could issue the two collectives in different orders."""
    alone.start(Vote(step=1))
    with pytest.raises(AssertionError, match="collect the vote first"):
        alone.maximum(1)


def test_a_single_rank_gathers_its_own_values(alone: VoteGroup) -> None:
    """One list for the one rank."""
    assert alone.gather([1, 2**62]) == [[1, 2**62]]


@pytest.mark.parametrize("value", [-1, 0, 2**40])
def test_the_maximum_of_a_single_rank_is_its_value(alone: VoteGroup, value: int) -> None:
    """No communication takes place."""
    assert alone.maximum(value) == value


def test_closing_twice_is_harmless(alone: VoteGroup) -> None:
    """The bootstrap and an exit handler may both close the group."""
    alone.close()
    alone.close()


def test_the_maxima_of_a_single_rank_are_its_values(alone: VoteGroup) -> None:
    """The values keep their positions."""
    assert alone.maxima([3, 0, 2**40]) == [3, 0, 2**40]


def test_two_ranks_get_the_maximum_at_each_position() -> None:
    """Both ranks get the same vector, from a single all-reduce each."""
    store = dist.HashStore()
    issued: list[tuple[int, str]] = []

    def run(rank: int, values: list[int]) -> list[int]:
        group = VoteGroup(
            store,
            rank=rank,
            world_size=2,
            prefix="test",
            timeout_seconds=30,
            on_collective=lambda name, sequence, operation, tensor, work: issued.append((rank, operation)),
        )
        maxima = group.maxima(values)
        group.close()
        return maxima

    results = run_ranks(lambda: run(0, [1, 0, 7]), lambda: run(1, [0, 2, 3]))
    assert results == [[1, 2, 7], [1, 2, 7]]
    assert sorted(issued) == [(0, "allreduce"), (1, "allreduce")]
