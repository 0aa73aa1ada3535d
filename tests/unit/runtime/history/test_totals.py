"""What ranks count goes on over attempts: each attempt counts once, and no sum ever falls."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.slots import make_slot
from support.journal import as_event

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.events import RankCounted
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.status import read_counts
from grpo_run.runtime.history.totals import RankTotals
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Histogram


def used_board(path: Path, attempt: int) -> Board:
    """A board of two ranks, of which rank 4 has voted three times and finished two optimizer phases."""
    board = Board.create(path / "board.mmap", 2)
    board.begin_attempt(attempt)
    slot = board.writer(0, rank=4, pid=os.getpid(), attempt=attempt)
    for _ in range(2):
        slot.enter(Phase.optimizer)
        slot.leave(Phase.optimizer)
    slot.votes, slot.vote_wait_seconds, slot.ended_eos = 3, 0.5, 7.0
    slot.publish()
    slot.memory_area.totals.retries = 2
    slot.memory_area.publish()
    return board


def test_counts_of_a_board_are_added_up_by_attempt(tmp_path: Path) -> None:
    """A rank that has not written has no record, and a record that is applied again adds nothing."""
    totals = RankTotals()
    for attempt in (0, 1):
        board = used_board(tmp_path, attempt)
        (record,) = read_counts(board)
        slot = board.read(0)
        assert slot is not None
        before = totals.total(4, attempt, "votes", slot.votes)
        totals.apply(record)
        totals.apply(record)
        assert totals.total(4, attempt, "votes", slot.votes) == before == 3.0 * (attempt + 1)
    assert totals.total(4, 2, "votes", 5) == 11
    assert totals.total(4, 2, "ended_eos", 0) == 14
    assert totals.total(4, 2, "retries", 0) == 4
    assert totals.total(5, 2, "votes", 1) == 1
    assert sum(totals.phases([])[Phase.optimizer].counts) == 4


def test_a_record_of_another_version_is_unreadable_and_changes_nothing() -> None:
    """A journal truncates events that are too long to their header."""
    history = History()
    header = {"event": "rank_counted", "time": 5.0, "rank": 0, "attempt": 0}
    for fields in ({}, {"counts": {}, "phases": {"sleep": {"counts": [], "sum_seconds": 0.0}}}):
        history.apply(as_event(header | fields))
    assert history.unreadable == 2
    assert history.wall.first is None
    assert history.ranks == RankTotals()


SECONDS = st.lists(st.lists(st.floats(0.0, 1e4), min_size=3, max_size=3), min_size=1, max_size=6)


@given(attempts=SECONDS)
def test_no_sum_falls_when_an_attempt_is_counted(attempts: list[list[float]]) -> None:
    """The same additions in the same order: rounding alone would be a reset for Prometheus."""
    totals, last = RankTotals(), 0.0
    for attempt, seconds in enumerate(attempts):
        live = [
            (make_slot(rank, attempt=attempt), {Phase.vote: Histogram().with_value(one)})
            for rank, one in enumerate(seconds)
        ]
        shown = totals.phases(live)[Phase.vote].sum_seconds
        assert shown >= last
        for slot, phases in live:
            one = phases[Phase.vote]
            vote = {"counts": list(one.counts), "sum_seconds": one.sum_seconds}
            totals.apply(RankCounted(rank=slot.rank, attempt=attempt, counts={}, phases={"vote": vote}))
            assert totals.phases(live)[Phase.vote].sum_seconds == shown
        assert totals.phases([])[Phase.vote].sum_seconds == shown
        last = shown
