"""The search for the samples that a function fails on, against functions that fail on known samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.rank.rewards._bisection import Bisection


def searched(samples: int, bad: set[int]) -> tuple[Bisection[str], int]:
    search = Bisection(samples, "whole")
    calls = 0
    while (part := search.next()) is not None:
        calls += 1
        if bad & set(part):
            search.fail_part(f"{part.start}")
        else:
            search.pass_part()
    return search, calls


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1)))
)
def test_exactly_the_bad_samples_fail_and_all_others_are_scored_once_in_order(
    case: tuple[int, set[int]],
) -> None:
    samples, bad = case
    search, _ = searched(samples, bad)
    assert set(search.failed) == bad
    scored = [index for part in search.passed for index in part]
    assert scored == [index for index in range(samples) if index not in bad]


def test_one_bad_sample_is_found_in_few_calls() -> None:
    assert searched(64, {37})[1] == 12


def test_a_sample_fails_for_the_reason_of_its_own_call() -> None:
    assert searched(8, {5})[0].failed == {5: "5"}


def test_what_is_not_decided_when_time_is_up_has_failed() -> None:
    search = Bisection(8, "whole")
    search.pass_part()
    search.fail_part("late")
    search.give_up("not tried")
    assert search.next() is None
    assert search.passed == [range(4)]
    assert search.failed == dict.fromkeys(range(4, 8), "not tried")


def test_a_single_sample_is_not_called_again() -> None:
    search = Bisection(1, "whole")
    assert search.next() is None
    assert search.failed == {0: "whole"}
