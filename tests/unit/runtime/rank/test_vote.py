"""The step vote: every flag of every rank reaches all ranks, and ranks that diverged are reported."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import ConsensusError
from grpo_run.runtime.rank.vote import ControlRequests, Flags, Vote, decode, either

FLAGS = st.builds(Flags, **{name: st.booleans() for name in Flags._fields})
REQUESTS = st.builds(ControlRequests, **{name: st.booleans() for name in ControlRequests._fields})
DIFFERENT = {"min_size": 2, "max_size": 8}


def reduced(votes: list[Vote]) -> list[int]:
    """Return what an all-reduce by MAX makes of the ranks' vectors."""
    return reduce(
        lambda left, right: [max(pair) for pair in zip(left, right, strict=True)],
        [vote.encode() for vote in votes],
    )


@given(
    flags=st.lists(FLAGS, min_size=1, max_size=8),
    step=st.integers(0, 2**31 - 1),
    fingerprint=st.integers(0, 2**32 - 1),
)
def test_a_flag_of_one_rank_reaches_all(flags: list[Flags], step: int, fingerprint: int) -> None:
    """The result is the union of all ranks' flags."""
    result = decode(reduced([Vote(step=step, fingerprint=fingerprint, flags=one) for one in flags]))
    assert result.step == step
    assert result.flags == reduce(either, flags)
    assert result.flags._asdict() == {
        name: any(getattr(one, name) for one in flags) for name in Flags._fields
    }


@given(requests=st.lists(REQUESTS, min_size=1, max_size=8))
def test_what_all_ranks_ask_for_is_told_from_what_some_ask_for(requests: list[ControlRequests]) -> None:
    """Each request is in one of the two or in none, and a stop of some ranks brings a save."""
    result = decode(reduced([Vote(step=1, requests=one) for one in requests]))
    for name in ControlRequests._fields:
        asked = [getattr(one, name) for one in requests]
        assert getattr(result.asked_by_all, name) == all(asked)
        some = any(asked) and not all(asked)
        if name == "should_save":
            some = some or result.asked_by_some.should_training_stop
        assert getattr(result.asked_by_some, name) == some


@given(steps=st.lists(st.integers(0, 2**31 - 1), **DIFFERENT).filter(lambda steps: len(set(steps)) > 1))
def test_votes_on_different_steps_are_an_error(steps: list[int]) -> None:
    """The error names the lowest and the highest step."""
    with pytest.raises(ConsensusError, match=rf"lowest is {min(steps)}, the highest {max(steps)}"):
        decode(reduced([Vote(step=step) for step in steps]))


@given(values=st.lists(st.integers(0, 2**32 - 1), **DIFFERENT).filter(lambda values: len(set(values)) > 1))
def test_different_phases_are_an_error(values: list[int]) -> None:
    """The error names the step and two fingerprints."""
    with pytest.raises(ConsensusError, match="different phases in step 7") as caught:
        decode(reduced([Vote(step=7, fingerprint=value) for value in values]))
    assert f"{max(values):#x}" in str(caught.value)
    assert f"{min(values):#x}" in str(caught.value)


@pytest.mark.parametrize("name", Flags._fields)
def test_each_flag_is_encoded_on_its_own(name: str) -> None:
    """Setting one flag sets that flag in the result and no other."""
    assert decode(Vote(step=1).encode()).flags == Flags()
    only = Flags(**{name: True})
    assert decode(Vote(step=1, flags=only).encode()).flags == only


def test_a_number_in_common_is_returned_if_it_is() -> None:
    """Also the largest, and of one rank that has none."""
    for numbers, found in (
        ((7, 7), 7),
        ((7, 8), None),
        ((0, 0), 0),
        ((0, 7), None),
        ((2**63 - 1,) * 2, 2**63 - 1),
    ):
        assert decode(reduced([Vote(step=1, common=number) for number in numbers])).common == found
