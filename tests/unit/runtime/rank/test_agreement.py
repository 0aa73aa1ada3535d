"""The decision that the calls of all ranks amount to, and the error that names where each rank is."""

from __future__ import annotations

import builtins

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import ConsensusError
from grpo_run.runtime.rank.consensus import CALL_NUMBERS, FUNCTIONS, CallSite, ConsensusCall, agree

SITES = st.builds(
    CallSite,
    function=st.sampled_from(FUNCTIONS),
    file=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=30),
    line=st.integers(1, 10**6),
    caller=st.sampled_from(["main", "<module>", "<lambda>"]),
)


def call(
    function: str = "any",
    line: int = 12,
    *,
    flag: bool = False,
    file: str = "/a/train.py",
    iteration: int = 0,
    ordinal: int = 4,
) -> ConsensusCall:
    """Return a call in `main`."""
    site = CallSite(function=function, file=file, line=line, caller="main")
    return ConsensusCall(site=site, flag=flag, ordinal=ordinal, iteration=iteration)


@given(site=SITES, flags=st.lists(st.booleans(), min_size=2, max_size=8), iteration=st.integers(0, 10**9))
def test_ranks_at_the_same_call_get_the_decision(site: CallSite, flags: list[bool], iteration: int) -> None:
    """`any` and `while_any` are true if one flag is, `all` if all are; on every rank."""
    calls = [ConsensusCall(site=site, flag=flag, ordinal=7, iteration=iteration) for flag in flags]
    answers = [one.encode() for one in calls]
    expected = builtins.all(flags) if site.function == "all" else builtins.any(flags)
    assert [agree(one, answers) for one in calls] == [expected] * len(calls)


@given(site=SITES, flag=st.booleans(), ordinal=st.integers(1, 2**40), iteration=st.integers(0, 2**40))
def test_a_call_is_received_as_it_was_sent(site: CallSite, flag: bool, ordinal: int, iteration: int) -> None:
    """All numbers fit into a signed 64-bit integer and are not negative."""
    sent = ConsensusCall(site=site, flag=flag, ordinal=ordinal, iteration=iteration)
    numbers = sent.encode()
    assert len(numbers) == CALL_NUMBERS
    assert min(numbers) >= 0
    assert max(numbers) < 2**63
    assert ConsensusCall.decode(numbers) == sent


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (call(line=26), "consensus.any at train.py:26 in main (call 4)"),
        (call("all"), "consensus.all at train.py:12 in main (call 4)"),
        (call(file="/a/loop.py"), "consensus.any at loop.py:12 in main (call 4)"),
    ],
)
def test_ranks_at_different_calls_get_an_error_that_names_both(other: ConsensusCall, named: str) -> None:
    """The same error on every rank. The first line, which a report quotes, names ranks, functions, lines and
    counts.
    """
    answers = [call(flag=True).encode(), other.encode()]
    errors = []
    for own in (call(flag=True), other):
        with pytest.raises(ConsensusError) as caught:
            agree(own, answers)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    first = errors[0].splitlines()[0]
    assert "rank 0 is in consensus.any at train.py:12 in main (call 4)" in first
    assert f"rank 1 is in {named}" in first
    assert len(first) <= 200
    assert "rank 0: /a/train.py:12" in errors[0]


def test_different_iterations_of_a_loop_are_an_error() -> None:
    """One rank has left the loop and begun it again: the same line, but another count."""
    calls = [call("while_any", iteration=iteration, ordinal=9) for iteration in (6, 1)]
    with pytest.raises(ConsensusError) as caught:
        agree(calls[0], [one.encode() for one in calls])
    for rank, iteration in enumerate((6, 1)):
        place = f"consensus.while_any at train.py:12 in main (iteration {iteration}, call 9)"
        assert f"rank {rank} is in {place}" in str(caught.value)


def test_folders_and_the_number_of_calls_may_differ() -> None:
    """Nodes may have the script in different places, and a rank that has joined later has called less
    often.
    """
    calls = [call(flag=True), call(file="/scratch/node1/train.py"), call(ordinal=1)]
    assert agree(call(), [one.encode() for one in calls])


def test_another_collective_in_the_place_of_a_call_is_an_error() -> None:
    """On a group that the script uses too, its own collective may meet a call."""
    answers = [call().encode(), [1] * CALL_NUMBERS, [-(2**60)] * CALL_NUMBERS]
    with pytest.raises(ConsensusError, match="ranks 1 and 2 are in another collective"):
        agree(call(), answers)


def test_many_ranks_are_grouped_by_place() -> None:
    """The error stays short with many ranks at many lines."""
    ranks = [call(line=rank // 16) for rank in range(16, 128)]
    with pytest.raises(ConsensusError) as caught:
        agree(ranks[0], [one.encode() for one in ranks])
    assert "ranks 0 to 15 are in consensus.any at train.py:1 in main" in str(caught.value)
    assert "48 more elsewhere" in str(caught.value)


def test_long_names_are_cut_on_every_rank_alike() -> None:
    """The file loses its beginning, the function its end; umlauts may lose a half."""
    own = ConsensusCall(
        site=CallSite(function="any", file="/ä" * 200 + "/train.py", line=1, caller="é" * 100),
        flag=True,
        ordinal=1,
    )
    received = ConsensusCall.decode(own.encode())
    assert received is not None
    assert received.site.file.endswith("/train.py")
    assert agree(own, [own.encode(), own.encode()])
