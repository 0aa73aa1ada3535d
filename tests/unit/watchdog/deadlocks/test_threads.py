"""Reports of ranks about their threads: when all of them wait, and when one may still act."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import (
    MAIN_THREAD_IN_BACKWARD,
    Position,
    ThreadReport,
    with_threads,
)


def pending(thread: str, **changes: Any) -> Collective:
    """An all-reduce in which this thread waits."""
    fields: dict[str, Any] = {
        "group": "0", "sequence": 3, "operation": "all_reduce", "sizes": (), "dtypes": (),
        "progress": CollectiveProgress.waiting, "thread": thread,
    }  # fmt: skip
    return Collective(**(fields | changes))


def report(**changes: Any) -> ThreadReport:
    """Threads 1 and 2 wait in collectives, and no other thread can act."""
    fields: dict[str, Any] = {
        "waiting": {"1": 40, "2": 50}, "passive": {"3": 60}, "active": (), "in_backward": None,
        "issued": {"0": 3},
        "uses_futures": False,
    }  # fmt: skip
    return ThreadReport(**(fields | changes))


RUNS = Position(rank=0, records=(pending("1"),))


def test_a_rank_whose_other_threads_cannot_act_waits_with_the_threads_that_it_reports() -> None:
    """Threads that only others can wake are none of them; what it has issued is known."""
    known = with_threads(RUNS, report())
    assert known == replace(RUNS, waiting_threads=frozenset({"1", "2"}), issued={"0": 3})


def test_a_rank_without_a_report_is_never_known_to_wait() -> None:
    """Whatever the board says of its backward pass, and however many threads were assumed to wait."""
    assumed = replace(RUNS, waiting_threads=frozenset({"1"}), in_backward=True)
    assert with_threads(assumed, None) == RUNS


def test_the_report_of_a_rank_that_has_exited_counts_no_more() -> None:
    """Its threads are gone."""
    gone = replace(RUNS, exited=True)
    assert with_threads(gone, report()) == gone


def test_one_thread_that_may_act_is_enough() -> None:
    """It may issue any collective."""
    assert with_threads(RUNS, report(active=("reader in read",))).waiting_threads is None


@pytest.mark.parametrize("switches", [0, 7])
def test_a_main_thread_in_a_backward_waits_too(switches: int) -> None:
    """If the board and the report agree, however often the thread was scheduled."""
    known = with_threads(replace(RUNS, in_backward=True), report(in_backward=switches))
    assert known.waiting_threads == {"1", "2", MAIN_THREAD_IN_BACKWARD}
    assert known.in_backward


def test_a_backward_that_has_ended_since_is_none() -> None:
    """The board was read before the threads."""
    known = with_threads(replace(RUNS, in_backward=True), report())
    assert known.waiting_threads == {"1", "2"}
    assert not known.in_backward


@pytest.mark.parametrize("switches", [0, 7])
def test_a_backward_that_the_board_does_not_show_may_act(switches: int) -> None:
    """What it waits for is not known."""
    assert with_threads(RUNS, report(in_backward=switches)).waiting_threads is None


@pytest.mark.parametrize(
    ("record", "known"),
    [
        (pending("1"), True),
        (pending("9"), False),
        (pending("1", point_to_point=True), False),
        (pending("9", progress=CollectiveProgress.enqueued), False),
        (pending("9", progress=CollectiveProgress.completed), True),
        (pending("1", progress=CollectiveProgress.completed, point_to_point=True), True),
    ],
)
def test_a_future_may_run_code_when_its_collective_completes(record: Collective, known: bool) -> None:
    """Unless a thread that is known to wait waits for it; without futures nothing runs."""
    position = Position(rank=0, records=(pending("1"), record))
    assert (with_threads(position, report(uses_futures=True)).waiting_threads is not None) is known
    assert with_threads(position, report()).waiting_threads is not None


def test_a_rank_without_records_has_nothing_pending() -> None:
    """Its log could not be read, so no future of it is known."""
    unread = Position(rank=0, records=None)
    assert with_threads(unread, report(uses_futures=True)).waiting_threads == {"1", "2"}
