"""A rank that may still come, or that cannot be observed, is no proof."""

from __future__ import annotations

import json
from dataclasses import replace

from support.builders.watchdog.collective_positions import (
    GATHER,
    PAST,
    VOTE,
    Call,
    after_exit,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.deadlocks.recording import parse_recording


def test_a_rank_that_outside_training_but_runs_is_late() -> None:
    """It may return to the group."""
    away = Position(rank=0, records=ran(PAST, last=CollectiveProgress.completed), outside_training=True)
    assert judge(ran([*PAST, GATHER]), away) is None


def test_a_late_rank_is_no_proof() -> None:
    """Rank 1 computes; two ranks that wait for it, even in two groups, prove nothing."""
    late = ran(PAST, last=CollectiveProgress.completed)
    assert judge(ran([*PAST, GATHER]), late) is None


def test_an_unobserved_rank_is_no_proof() -> None:
    """Even if its process is said to have exited; a rank of another node counts as late."""
    waits = ran([*PAST, GATHER])
    assert judge(waits, None) is None
    assert judge(waits, Position(rank=1, records=None, exited=True)) is None
    assert judge(waits, world_size=2) is None


def test_a_pending_collective_without_a_waiter_blocks_no_rank() -> None:
    """A vote is started early and collected later."""
    pending = ran([*PAST, VOTE], last=CollectiveProgress.enqueued)
    assert judge(ran([*PAST, GATHER]), pending) is None


def test_a_slow_background_thread_is_no_proof() -> None:
    """Rank 0's main thread waits for rank 1's, which computes; rank 1's second thread waits for rank 0's."""

    def threaded(last: Call, *, main: int, second: int) -> tuple[Collective, ...]:
        calls = [("0", "all_reduce", 10, 1)] * main + [("side", "all_reduce", 20, 1)] * second
        records = ran([*calls, last])
        return tuple(replace(r, thread="1" if r.group == "0" else "2") for r in records)

    records = [
        threaded(("0", "all_reduce", 10, 1), main=2, second=1),
        threaded(("side", "all_reduce", 20, 1), main=2, second=1),
    ]
    assert judge(*[Position(rank=0, records=known) for known in records]) is None
    assert judge(*records) is not None


def test_dropped_records_are_no_proof() -> None:
    """Only the newest records are retained: a rank that is further on has enqueued the dropped ones."""
    ahead = ran([GATHER] * 12, last=CollectiveProgress.completed)[-3:]
    assert judge(ran([GATHER] * 5), Position(rank=1, records=ahead, exited=True)) is None
    forgot = ran([VOTE] * 4, last=CollectiveProgress.completed)[-2:]
    assert judge(ran([GATHER] * 5), Position(rank=1, records=forgot, exited=True)) is None


def test_a_group_with_two_backends_proves_nothing() -> None:
    """Each backend counts separately: equal numbers may be different collectives."""

    def answer(*names: str) -> str:
        entries = [
            {
                "process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": number,
                "profiling_name": name, "input_sizes": [[7]], "input_dtypes": ["Float"], "thread_id": "1",
                "state": "scheduled",
            }
            for number, name in enumerate(names, 1)
        ]  # fmt: skip
        return json.dumps({"entries": entries})

    one = parse_recording(answer("nccl:all_reduce", "gloo:all_gather"))
    other = parse_recording(answer("gloo:all_gather", "nccl:all_reduce"))
    assert judge(one, other) is None
    alone = [parse_recording(answer(f"nccl:{name}")) for name in ("all_reduce", "all_gather")]
    assert judge(*alone) is not None


def test_with_known_members_an_unobserved_rank_is_late() -> None:
    """It holds up nothing, and hides nothing: the member that exited is still proof."""
    assert proved(ran([*PAST, GATHER]), after_exit(PAST), None).culprits == (1,)
