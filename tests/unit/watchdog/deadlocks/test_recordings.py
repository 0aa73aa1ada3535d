"""Collectives are parsed from Flight Recorders and merged with the collective log."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    dtype_name,
    operation_name,
    python_dtype_name,
    size_bytes,
)
from grpo_run.watchdog.deadlocks.recording import group_positions, join_recordings, merge, parse_recording
from grpo_run.watchdog.verdict import Location

LINE = Location(file="/home/user/train.py", line=88, function="reward")
ENQUEUED, WAITING, COMPLETED = CollectiveProgress


def gloo_entry(**changes: Any) -> dict[str, Any]:
    """An all-reduce on the default group as torch 2.13 writes it for Gloo, pending."""
    return {
        "collective_seq_id": 8, "input_dtypes": ["Float"], "input_sizes": [[7]], "is_p2p": False, "op_id": 8,
        "output_dtypes": ["Float"], "output_sizes": [[7]], "p2p_seq_id": 0, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "record_id": 8,
        "retired": False, "state": "scheduled", "thread_id": "140387276528512", "thread_name": "python3",
        "time_created_ns": 1795238780661789801, "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0, "timeout_ms": 1800000,
    } | changes  # fmt: skip


def recording(*entries: dict[str, Any], **changes: Any) -> str:
    """The handler's whole answer, with Gloo's group configuration."""
    answer = {
        "comm_lib_version": "", "entries": list(entries), "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "7", "last_enqueued_collective": "8",
                            "last_started_collective": "-1"}},
        "version": "2.10",
    }  # fmt: skip
    return json.dumps(answer | changes)


def collective(sequence: int = 1, operation: str = "all_reduce", **changes: Any) -> Collective:
    """A pending all-reduce of seven floats on the default group."""
    fields: dict[str, Any] = {
        "group": "0", "sequence": sequence, "operation": operation, "sizes": ((7,),), "dtypes": ("Float",),
        "progress": ENQUEUED,
    }  # fmt: skip
    return Collective(**(fields | changes))


@pytest.mark.parametrize(
    ("entry", "config", "changed"),
    [
        ({}, {}, {}),
        ({"retired": True}, {}, {"progress": COMPLETED}),
        (  # NCCL's entries complete before the watchdog thread retires them; `pg_config` has the members
            {"profiling_name": "nccl:_all_gather_base", "state": "completed"},
            {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 2, 1]"}},
            {"operation": "all_gather", "progress": COMPLETED, "members": (0, 1, 2), "on_device": True},
        ),
        ({"profiling_name": "nccl:all_reduce", "state": "started"}, {}, {"on_device": True}),
        (  # a send has numbers of its own, and is not compared
            {"profiling_name": "nccl:send 0->1", "is_p2p": True, "p2p_seq_id": 3}, {},
            {"operation": "send", "sequence": 3, "point_to_point": True, "on_device": True},
        ),
        # all unnamed groups share one configuration, which is therefore ignored
        ({"process_group": ["", ""], "pg_id": 3}, {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
         {"group": "#3", "point_to_point": True}),
        # autograd's device thread works for any thread that called `backward`
        ({"thread_name": "pt_autograd_0"}, {}, {"thread": ""}),
        # not a timeout of zero, which would exclude every collective from proof
        ({"timeout_ms": 0}, {}, {"timeout_seconds": math.inf}),
        ({"timeout_ms": -1}, {}, {"timeout_seconds": math.inf}),
        ({"timeout_ms": 1}, {}, {"timeout_seconds": 0.001}),
    ],
)  # fmt: skip
def test_an_entry_is_parsed(entry: dict[str, Any], config: dict[str, Any], changed: dict[str, Any]) -> None:
    """Gloo never updates `state`; only `retired` says whether it completed. Timeouts are in milliseconds."""
    (read,) = parse_recording(recording(gloo_entry(**entry), pg_config=config).encode())
    expected: dict[str, Any] = {"sequence": 8, "thread": "140387276528512", "timeout_seconds": 1800.0}
    assert read == collective(**(expected | changed))


def test_a_missing_timeout_is_infinite() -> None:
    """Older versions of torch do not tell it."""
    entry = gloo_entry()
    del entry["timeout_ms"]
    (read,) = parse_recording(recording(entry))
    assert read.timeout_seconds == math.inf


def test_a_group_with_two_backends_is_not_compared() -> None:
    """`cpu:gloo,cuda:nccl` numbers twice under one name; other groups of the rank are not affected."""
    entries = [
        gloo_entry(profiling_name="gloo:all_reduce", collective_seq_id=1),
        gloo_entry(profiling_name="nccl:all_gather", collective_seq_id=1),
        gloo_entry(profiling_name="nccl:all_reduce", collective_seq_id=1, process_group=["1", ""], pg_id=1),
    ]
    read = parse_recording(recording(*entries))
    assert [(one.group, one.point_to_point) for one in read] == [("0", True), ("0", True), ("1", False)]


def test_an_answer_without_entries_holds_no_collectives() -> None:
    """torch leaves the list out while nothing has been recorded."""
    answer = '{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
    assert parse_recording(answer) == ()
    gloo, empty = recording(gloo_entry()).encode(), b'{"pg_config": {}, "version": "2.10"}'
    assert join_recordings(gloo, empty) == gloo
    nccl = recording(gloo_entry(profiling_name="nccl:all_reduce")).encode()
    (read,) = parse_recording(join_recordings(empty, nccl))
    assert read.on_device


def test_the_recorders_of_gloo_and_nccl_are_read_as_one() -> None:
    """In the order in which the process has enqueued; a group that both have used proves nothing."""
    gloo = recording(
        gloo_entry(process_group=["1", ""], time_created_ns=2),
        gloo_entry(process_group=["2", ""], pg_id=5, time_created_ns=4),
        pg_config={"1": {"ranks": "[0, 1]"}},
    )
    nccl = recording(
        gloo_entry(profiling_name="nccl:all_reduce", time_created_ns=1, state="completed"),
        gloo_entry(profiling_name="nccl:all_gather", process_group=["2", ""], pg_id=6, time_created_ns=3),
        pg_config={"0": {"ranks": "[0, 1, 2]"}},
    )
    read = parse_recording(join_recordings(gloo.encode(), nccl.encode()))
    assert [(one.group, one.on_device, one.completed, one.members, one.point_to_point) for one in read] == [
        ("0", True, True, (0, 1, 2), False), ("1", False, False, (0, 1), False),
        ("2", True, False, (), True), ("2", False, False, (), True),
    ]  # fmt: skip


@pytest.mark.parametrize("text", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": 3}'])
def test_an_answer_of_nccl_that_is_not_understood_is_rejected(text: bytes) -> None:
    """It must not count as a rank without collectives on its GPU."""
    with pytest.raises(ValueError, match="Flight Recorder answers not understood"):
        join_recordings(recording(gloo_entry()).encode(), text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the text"), ("[]", "the text"), (b"\xff\xfe", "the text"), ("{}", "entries"),
        (recording(gloo_entry(collective_seq_id=-1)), "entries.0.collective_seq_id"),
        (recording(gloo_entry(), gloo_entry(process_group=["0"])), "entries.1.process_group"),
        (recording(gloo_entry(input_sizes="7")), "entries.0.input_sizes"),
        (recording(pg_config={"0": {"ranks": "[0, 1"}}), "pg_config.0.ranks"),
        (recording(pg_config={"0": {"ranks": '["a"]'}}), "pg_config.0.ranks"),
    ],
)  # fmt: skip
def test_a_malformed_answer_is_rejected_with_one_line(text: str | bytes, where: str) -> None:
    """The error names the wrong field."""
    with pytest.raises(ValueError, match=where) as caught:
        parse_recording(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "raws"),
    [
        ("all_reduce", "allreduce allreduce_coalesced gloo:all_reduce gloo:sparse_all_reduce"),
        ("all_gather", "allgather _allgather_base allgather_coalesced all_gather_single gloo:all_gather"),
        ("all_gather", "allgather_into_tensor_coalesced nccl:_all_gather_base"),
        ("all_gather", "nccl:all_gather_into_tensor_coalesced"),
        ("all_to_all", "alltoall alltoall_base all_to_all_single gloo:all_to_all"),
        ("reduce_scatter", "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced"),
        ("reduce_scatter", "reduce_scatter_single nccl:_reduce_scatter_base"),
        ("broadcast", "broadcast nccl:_broadcast_oop"), ("reduce", "reduce nccl:_reduce_oop"),
        ("barrier", "barrier nccl:all_reduce_barrier gloo:barrier"), ("gather", "gather"),
        ("scatter", "scatter"), ("recv", "recv gloo:recvAnySource"), ("coalesced", "nccl:coalesced"),
        ("backward", "backward"),
    ],
)  # fmt: skip
def test_both_sources_use_the_same_operation_names(name: str, raws: str) -> None:
    """Names of the recorder and methods of ProcessGroup compare equal."""
    assert {operation_name(raw) for raw in raws.split()} == {name}


def test_names_with_peers_or_without_words() -> None:
    """NCCL's sends name their peer; unknown types are unchanged."""
    assert [operation_name(raw) for raw in ("nccl:send 0->1", "nccl:recv 0<-1", "")] == ["send", "recv", ""]
    assert [dtype_name(raw) for raw in ("torch.bfloat16", "int64", "Float", "Odd")] == [
        "BFloat16", "Long", "Float", "Odd",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "dtype",
    [
        "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
        "ComplexDouble", "Float8_e4m3fn", "Float8_e5m2",
    ],
)  # fmt: skip
def test_the_size_of_an_element_is_in_the_name_of_its_type(dtype: str) -> None:
    """`float32` has 32 bits; a bool has a byte."""
    bits = re.search(r"\d+", python_dtype_name(dtype))
    assert size_bytes(collective(sizes=((5,),), dtypes=(dtype,))) == 5 * (int(bits[0]) // 8 if bits else 1)


@pytest.mark.parametrize(
    ("sizes", "dtypes", "expected"),
    [
        (((2,), (3,)), ("Float", "Float"), 20), (((2, 3), (), (4,)), ("Float",), 44),
        (((2, 5), (3,)), ("Float", "Half"), 46), (((2,), (3,), (4,)), ("Float", "Half"), None),
        (((2,), (3,)), ("Float", "Half", "Half"), None), (((2,),), ("Odd",), None),
        (((2,), (3,)), ("Float", "Odd"), None), (((2,),), (), None), ((), ("Float",), None), ((), (), None),
    ],
)  # fmt: skip
def test_inputs_whose_size_is_not_known_have_none(
    sizes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], expected: int | None
) -> None:
    """An unknown size is no difference. One type stands for all inputs; several are one for each."""
    assert size_bytes(collective(sizes=sizes, dtypes=dtypes)) == expected


BARE: dict[str, Any] = {"sizes": (), "dtypes": ()}
LOGGED: dict[str, Any] = {"location": LINE, "step": 3, "members": (0, 1)}
SEND = collective(1, "send", point_to_point=True)


@pytest.mark.parametrize(
    ("recorded", "noted", "merged"),
    [
        # operation and progress come from the recorder; line, step, members and waiting from the log
        (
            [collective(4, thread="9")],
            [collective(4, "reduce_scatter", **BARE, progress=WAITING, **LOGGED)],
            [collective(4, thread="9", progress=WAITING, **LOGGED)],
        ),
        # the recorder knows the thread that issued the collective; another thread may wait
        (
            [collective(thread="1", timeout_seconds=5.0)], [collective(progress=WAITING, thread="2")],
            [collective(thread="2", progress=WAITING, timeout_seconds=5.0)],
        ),
        (
            [collective(thread="1", timeout_seconds=5.0)], [collective(thread="2", timeout_seconds=0.0)],
            [collective(thread="1", timeout_seconds=0.0)],
        ),
        # NCCL's `wait` returns early, and a log entry may be updated late: the recorder decides completion
        *([[collective(progress=COMPLETED)], [collective(progress=one)], [collective(progress=COMPLETED)]]
          for one in CollectiveProgress),
        ([collective()], [collective(progress=COMPLETED)], [collective()]),
        # either source alone is unchanged
        ([], [collective(1), collective(2)], [collective(1), collective(2)]),
        ([collective(1), collective(2)], [], [collective(1), collective(2)]),
        # the first gradient bucket has the sequence number of the log entry, and no line of its own
        ([collective(2)], [collective(2, BACKWARD, **BARE, location=LINE)],
         [collective(2, location=LINE, in_backward=True)]),
        # under `no_sync`, the next operation gets the number at which the backward was logged
        ([], [collective(2, BACKWARD, **BARE), collective(2, "all_gather")], [collective(2, "all_gather")]),
        ([SEND], [collective(1, location=LINE)], [SEND, collective(1, location=LINE)]),
        # a group whose numbers decrease is excluded, even if the recorder has only seen the new one
        ([], [collective(7), collective(1)],
         [collective(7, point_to_point=True), collective(1, point_to_point=True)]),
    ],
)  # fmt: skip
def test_merging_takes_each_field_from_its_source(
    recorded: list[Collective], noted: list[Collective], merged: list[Collective]
) -> None:
    """Of one collective, by its group and number."""
    assert list(merge(recorded, noted)) == merged


def test_merging_keeps_the_order_and_entries_of_one_source() -> None:
    """Older log entries come first, C++'s collectives keep their position, newer log entries follow. Two
    threads may be recorded in one order and logged in the other.
    """
    recorded = [collective(3), collective(4), collective(1, group="v"), collective(5)]
    noted = [collective(n) for n in (1, 2, 3)] + [collective(1, group="v"), collective(6)]
    keys = [(record.group, record.sequence) for record in merge(recorded, noted)]
    assert keys == [("0", 1), ("0", 2), ("0", 3), ("0", 4), ("v", 1), ("0", 5), ("0", 6)]
    recorded = [collective(1), collective(1, group="b"), collective(2)]
    noted = [collective(1, group="b", step=5), collective(1, step=5), collective(3)]
    found = [(one.group, one.sequence, one.step) for one in merge(recorded, noted)]
    assert found == [("0", 1, 5), ("b", 1, 5), ("0", 2, -1), ("0", 3, -1)]


def test_a_group_whose_numbers_decrease_is_excluded_from_proof() -> None:
    """It was destroyed and created again; all its records are excluded, and no other group's. Sends count
    separately; a backward has the number of the all-reduce that follows.
    """

    def excluded(*numbers: int, group: str = "5", between: tuple[dict[str, Any], ...] = ()) -> list[bool]:
        made = [gloo_entry(collective_seq_id=number, process_group=[group, ""]) for number in numbers]
        others = [gloo_entry(collective_seq_id=number) for number in (1, 2)]
        read = parse_recording(recording(*made[:1], *between, *made[1:], *others))
        assert not any(one.point_to_point for one in read[-2:])
        return [one.point_to_point for one in read[:-2]]

    assert excluded(7, 8, 1, 2) == [True] * 4
    assert excluded(7, 1, 9) == [True] * 3
    send = gloo_entry(is_p2p=True, p2p_seq_id=1, process_group=["5", ""], profiling_name="gloo:send")
    assert excluded(7, 8, between=(send,)) == [False, True, False]
    noted = [collective(9, BACKWARD), collective(8), collective(9)]
    assert not any(one.point_to_point for one in merge([], noted))


def test_each_group_has_its_last_numbers() -> None:
    """Without messages, grpo-run's own groups, and groups of which no completed collective is left."""
    done = {"progress": COMPLETED}
    records = [
        collective(3, **done), collective(4), collective(1, group="new"), collective(9, group="old"),
        collective(2, group="grpo_run/vote", **done), collective(7, point_to_point=True, **done),
    ]  # fmt: skip
    assert group_positions(records) == {"0": (4, 3), "new": (1, 0)}
