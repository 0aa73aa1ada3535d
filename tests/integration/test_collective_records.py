"""What real ranks show of every kind of collective call: a contract with torch on which proofs rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.record_ranks import RecordRanks

from grpo_run.watchdog.deadlocks.recording import merge

WAITS, ACTS = True, False
CALLS = {
    "all_reduce": ("all_reduce", WAITS),
    "message": (None, ACTS),
    "after_message": ("all_gather", WAITS),
    "ring": (None, ACTS),
    "after_ring": ("all_reduce", WAITS),
    "monitored_barrier": (None, ACTS),
    "after_monitored_barrier": ("all_gather", WAITS),
    "barrier": ("barrier", WAITS),
    "limited_barrier": ("barrier", ACTS),
    "wait": ("all_reduce", WAITS),
    "limited_wait": ("all_reduce", ACTS),
    "future": ("all_reduce", ACTS),
    "broadcast": ("broadcast", WAITS),
    "reduce": ("reduce", WAITS),
    "gather": ("gather", WAITS),
    "scatter": ("scatter", WAITS),
    "all_to_all": ("all_to_all", WAITS),
    "reduce_scatter": ("all_reduce", WAITS),
    "after_reduce_scatter": ("all_gather", WAITS),
    "reduce_scatter_single": ("all_reduce", WAITS),
    "all_gather_object": ("all_gather", WAITS),
    "broadcast_object_list": ("broadcast", WAITS),
    "scatter_object_list": ("broadcast", WAITS),
    "gather_object": ("all_gather", WAITS),
    "coalescing_manager": ("all_reduce", WAITS),
    "functional": ("all_reduce", ACTS),
    "pair": ("all_reduce", WAITS),
    "new_group": (None, ACTS),
    "last": ("all_reduce", WAITS),
}
"""What the Flight Recorder shows of each call while rank 0 is late (None: nothing pending), and whether rank
1 is known to wait in it. A thread that is not counts as one that may act."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RecordRanks]:
    """Three real ranks."""
    ranks = RecordRanks()
    ranks.start()
    yield ranks
    ranks.stop()


@pytest.mark.timeout(180)
def test_every_call_is_recorded_as_proofs_assume(ranks: RecordRanks) -> None:
    """Names, pending operations, waiting threads, roots, and equal numbers on all ranks and in both
    records.
    """
    for name, (operation, waits) in CALLS.items():
        late, done = ranks.go_through(name)
        merged = {rank: merge(late.recorded[rank], late.logged[rank]) for rank in late.recorded}
        pending = [record for record in merged[1] if not record.completed]
        assert [record.operation for record in pending[:1]] == ([operation] if operation else []), name
        blocked = {record.thread for record in pending if record.progress.name == "waiting"}
        report = late.threads[1]
        if waits:
            assert set(report.waiting) == blocked != set(), name
            assert report.active == (), name
            assert all(record.root == 0 for record in pending if record.operation in ("broadcast", "reduce"))
        else:
            assert report.waiting == {}, name
            assert report.active != (), name
        assert late.threads[0].active != (), name
        assert (report.in_backward, report.passive) == (None, {}), name
        for reading in (late, done):
            both = {rank: merge(reading.recorded[rank], reading.logged[rank]) for rank in reading.recorded}
            assert not any(record.point_to_point for records in both.values() for record in records), name
        newest = {
            rank: {record.group: record.sequence for record in records}
            for rank, records in done.recorded.items()
        }
        assert (
            newest[0]
            == newest[1]
            == newest[2] | {group: newest[0][group] for group in newest[0] if group != "0"}
        )
        consumed = 2 if name == "monitored_barrier" else 0  # numbers that no record has
        issued = {
            rank: {
                group: done.threads[rank].issued[group] - (consumed if group == "0" else 0)
                for group in newest[rank]
            }
            for rank in newest
        }
        assert issued == newest, name
    assert done.threads[1].uses_futures
