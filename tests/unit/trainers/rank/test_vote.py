"""The per-step vote: what ranks bring, and what all of them know after it."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import ConsensusError
from grpo_run.trainers.rank.vote import Ballot, VoteGroup, decode

REQUESTS = ("stop", "save", "snapshot", "nonfinite", "oom")


def reduced(ballots: list[Ballot]) -> list[int]:
    """What an all-reduce by MAX makes of the ranks' vectors."""
    return reduce(
        lambda left, right: [max(pair) for pair in zip(left, right, strict=True)],
        [ballot.encode() for ballot in ballots],
    )


BALLOT = st.fixed_dictionaries({name: st.booleans() for name in REQUESTS})


@given(
    requests=st.lists(BALLOT, min_size=1, max_size=8),
    step=st.integers(0, 2**31 - 1),
    fingerprint=st.integers(0, 2**32 - 1),
)
def test_what_one_rank_asks_all_ranks_know(
    requests: list[dict[str, bool]], step: int, fingerprint: int
) -> None:
    """The outcome is the union of the requests, whoever made them."""
    ballots = [Ballot(step=step, fingerprint=fingerprint, **request) for request in requests]
    outcome = decode(reduced(ballots))
    assert outcome.step == step
    assert {name: getattr(outcome, name) for name in REQUESTS} == {
        name: any(request[name] for request in requests) for name in REQUESTS
    }


@given(
    steps=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=8).filter(lambda all: len(set(all)) > 1)
)
def test_ranks_at_different_steps_are_told_so(steps: list[int]) -> None:
    """With the first and the last step, on every rank alike."""
    with pytest.raises(ConsensusError, match=rf"first on {max(steps)}, the last on {min(steps)}"):
        decode(reduced([Ballot(step=step) for step in steps]))


@given(
    paths=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=8).filter(lambda all: len(set(all)) > 1)
)
def test_ranks_on_different_paths_are_told_so(paths: list[int]) -> None:
    """With the step and both fingerprints."""
    with pytest.raises(ConsensusError, match="different paths to step 7") as caught:
        decode(reduced([Ballot(step=7, fingerprint=path) for path in paths]))
    assert f"{max(paths):#x}" in str(caught.value)
    assert f"{min(paths):#x}" in str(caught.value)


def test_every_request_of_a_ballot_is_carried() -> None:
    """A field added to the ballot and forgotten in the vector would never be heard."""
    quiet = decode(Ballot(step=1).encode())
    for name in set(Ballot.__dataclass_fields__) - {"step", "fingerprint"}:
        assert getattr(quiet, name) is False
        assert getattr(decode(Ballot(step=1, **{name: True}).encode()), name) is True


@pytest.fixture
def alone() -> VoteGroup:
    """A group of one rank, without a store."""
    return VoteGroup(None, rank=0, world_size=1, prefix="test")


def test_a_single_rank_votes_without_a_store(alone: VoteGroup) -> None:
    """It agrees with itself."""
    alone.start(Ballot(step=3, save=True))
    outcome = alone.collect()
    assert outcome is not None
    assert (outcome.step, outcome.save, outcome.stop) == (3, True, False)
    assert alone.votes == 1


def test_without_a_vote_there_is_nothing_to_collect(alone: VoteGroup) -> None:
    """Before the first, and after each."""
    assert alone.collect() is None
    alone.start(Ballot(step=1))
    alone.collect()
    assert alone.collect() is None
    assert alone.votes == 1


def test_a_second_vote_before_the_first_is_read_is_our_own_bug(alone: VoteGroup) -> None:
    """Its outcome would be lost."""
    alone.start(Ballot(step=1))
    with pytest.raises(AssertionError, match="under way"):
        alone.start(Ballot(step=2))


def test_a_maximum_during_a_vote_is_our_own_bug(alone: VoteGroup) -> None:
    """Both would share the group, in an order that ranks may not share."""
    alone.start(Ballot(step=1))
    with pytest.raises(AssertionError, match="collect the vote first"):
        alone.maximum(1)


def test_a_single_rank_gathers_its_own(alone: VoteGroup) -> None:
    """Once for each rank there is."""
    assert alone.gather([1, 2**62]) == [[1, 2**62]]


@pytest.mark.parametrize("value", [-1, 0, 2**40])
def test_a_single_ranks_maximum_is_its_own(alone: VoteGroup, value: int) -> None:
    """At once."""
    assert alone.maximum(value) == value


def test_closing_twice_does_no_harm(alone: VoteGroup) -> None:
    """The bootstrap and an exit handler may both do it."""
    alone.close()
    alone.close()
