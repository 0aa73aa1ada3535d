"""The vote group with one rank: votes, collective decisions, and the order they require."""

from __future__ import annotations

import pytest

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
    """Before the first vote, and after each collected one."""
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
    """Without any communication."""
    assert alone.maximum(value) == value


def test_closing_twice_is_harmless(alone: VoteGroup) -> None:
    """The bootstrap and an exit handler may both close the group."""
    alone.close()
    alone.close()
