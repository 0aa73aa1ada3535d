"""A deadlock is described with its ranks and their lines, from what the recorders have answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.builders.watchdog.collective_positions import (
    GATHER,
    LATER,
    PAST,
    REDUCE,
    VOTE,
    Call,
    at_line,
    proved,
    ran,
)

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.deadlocks.recording import merge, parse_recording


def test_many_ranks_are_named_as_a_range() -> None:
    """The sentence stays short with sixteen ranks."""
    found = proved(*[ran([GATHER])] * 7, ran([REDUCE]), *[ran([GATHER])] * 8)
    assert found.culprits == (7,)
    assert "while ranks 0 to 6 and 8 to 15 are in all_gather" in found.sentence


def test_the_stack_supplies_a_missing_line() -> None:
    """C++'s collectives have no line; the main thread's stack has one."""
    bare = Position(rank=0, records=ran([REDUCE], location=None), stack_location=at_line(300))
    found = proved(bare, ran([GATHER]))
    assert "train.py:300" in found.sentence
    assert found.locations[0] == at_line(300)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_recorder_answers_and_logs_are_a_proof(backend: str) -> None:
    """From the recorders' JSON and the collective logs to the proof, for either backend."""

    def answer(names: Sequence[str]) -> str:
        entries = [
            {
                "process_group": ["0", "default_pg"],
                "pg_id": 0,
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "is_p2p": False,
                "profiling_name": f"{backend}:{name}",
                "input_sizes": [[7]],
                "input_dtypes": ["Float"],
                "retired": number < len(names),
                "thread_id": "1",
                "state": "scheduled"
                if backend == "gloo"
                else "started"
                if number == len(names)
                else "completed",
            }
            for number, name in enumerate(names, 1)
        ]
        ranks = "[]" if backend == "gloo" else "[0, 1]"
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        return json.dumps({"entries": entries, "pg_config": config, "pg_status": {}, "version": "2.10"})

    gather = "all_gather" if backend == "gloo" else "_all_gather_base"
    waits = ran([("0", "barrier", 5, 0)] * 6 + [("0", "all_gather", 88, 7)])[-1:]
    one = merge(parse_recording(answer([gather, "all_reduce"] * 3 + [gather])), waits)
    other = parse_recording(answer([gather, "all_reduce"] * 3 + ["all_reduce"]))
    found = proved(one, other)
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, (1,))
    assert found.mismatch == (
        "all_reduce of 7 float32 elements against all_gather of 7 float32 elements at #7 of group 0"
    )


def test_every_observed_rank_is_placed() -> None:
    """At the collective it waits for, else at its last one; a rank without records has no place."""
    runs = ran(PAST, last=CollectiveProgress.completed)
    found = proved(ran([*PAST, GATHER]), ran([*PAST, LATER]), runs, (), None)
    places = [(at.operation, at.sequence) if (at := found.at[rank]) else None for rank in range(5)]
    assert places == [("all_gather", 7), ("all_reduce", 7), ("all_reduce", 3), None, None]


def test_a_rank_is_placed_where_it_waits_and_not_where_it_last_enqueued() -> None:
    """A vote enqueued later does not hide the collective that blocks the rank."""
    apart: Call = ("apart", "all_reduce", 60, 1)
    records = ran([*PAST, apart, VOTE], last=CollectiveProgress.enqueued)
    waits = (*records[:-2], replace(records[-2], progress=CollectiveProgress.waiting), records[-1])
    assert (at := proved(ran([*PAST, GATHER]), ran([*PAST, LATER]), waits).at[2]) is not None
    assert at.group == "apart"
