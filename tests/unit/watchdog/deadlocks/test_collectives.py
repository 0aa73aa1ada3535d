"""Collectives: parsed from Flight Recorders, merged with the collective log, and compared."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    can_meet,
    dtype_name,
    operation_name,
    share_group,
)
from grpo_run.watchdog.deadlocks.recording import join_recordings, merge, parse_recording
from grpo_run.watchdog.verdict import Location

LINE = Location(file="/home/user/train.py", line=88, function="reward")


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
        "progress": CollectiveProgress.enqueued,
    }  # fmt: skip
    return Collective(**(fields | changes))


def test_a_pending_gloo_collective_is_parsed() -> None:
    """Gloo never updates `state`; only `retired` says whether it completed.

    The timeout is in milliseconds.
    """
    (read,) = parse_recording(recording(gloo_entry()))
    assert read == collective(8, thread="140387276528512", timeout_seconds=1800.0)


def test_gloo_completion_is_in_retired() -> None:
    """A collective that is `scheduled` and retired is completed."""
    (read,) = parse_recording(recording(gloo_entry(retired=True)).encode())
    assert read.progress is CollectiveProgress.completed


@pytest.mark.parametrize(
    ("state", "progress"),
    [
        ("scheduled", CollectiveProgress.enqueued),
        ("started", CollectiveProgress.enqueued),
        ("completed", CollectiveProgress.completed),
    ],
)
def test_nccl_completion_is_in_state(state: str, progress: CollectiveProgress) -> None:
    """NCCL's entries complete before the watchdog thread retires them; `pg_config` has the members."""
    entry = gloo_entry(profiling_name="nccl:_all_gather_base", state=state)
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    (read,) = parse_recording(recording(entry, pg_config=config))
    assert (read.progress, read.operation, read.members) == (progress, "all_gather", (0, 1, 2))


def test_nccl_point_to_point_has_its_own_sequence() -> None:
    """A send is counted by `p2p_seq_id` and marked, so that it is not compared."""
    entry = gloo_entry(profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=3)
    (read,) = parse_recording(recording(entry))
    assert (read.operation, read.sequence, read.point_to_point) == ("send", 3, True)


def test_unnamed_groups_are_told_apart_and_share_no_members() -> None:
    """All unnamed groups share one configuration, which is therefore ignored."""
    entries = [gloo_entry(process_group=["", ""], pg_id=number) for number in (2, 3)]
    config = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}
    read = parse_recording(recording(*entries, pg_config=config))
    assert [(record.group, record.members) for record in read] == [("#2", ()), ("#3", ())]


def test_a_group_with_two_backends_is_not_compared() -> None:
    """`cpu:gloo,cuda:nccl` numbers twice under one name; other groups of the rank are not affected."""
    entries = [
        gloo_entry(profiling_name="gloo:all_reduce", collective_seq_id=1),
        gloo_entry(profiling_name="nccl:all_gather", collective_seq_id=1),
        gloo_entry(profiling_name="nccl:all_reduce", collective_seq_id=1, process_group=["1", ""], pg_id=1),
    ]
    read = parse_recording(recording(*entries))
    assert [(one.group, one.point_to_point) for one in read] == [("0", True), ("0", True), ("1", False)]


def test_autograd_threads_are_unknown_threads() -> None:
    """Autograd's device thread works for any thread that called `backward`."""
    (read,) = parse_recording(recording(gloo_entry(thread_name="pt_autograd_0")))
    assert read.thread == ""


def test_an_answer_without_entries_holds_no_collectives() -> None:
    """torch leaves the list out while nothing has been recorded."""
    answer = '{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
    assert parse_recording(answer) == ()


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
        ("0", True, True, (0, 1, 2), False),
        ("1", False, False, (0, 1), False),
        ("2", True, False, (), True),
        ("2", False, False, (), True),
    ]


def test_an_empty_recorder_of_nccl_adds_nothing() -> None:
    """Torch leaves the list out while nothing has been recorded."""
    gloo = recording(gloo_entry()).encode()
    assert join_recordings(gloo, b'{"pg_config": {}, "version": "2.10"}') == gloo
    nccl = recording(gloo_entry(profiling_name="nccl:all_reduce")).encode()
    (read,) = parse_recording(join_recordings(b'{"pg_config": {}, "version": "2.10"}', nccl))
    assert read.on_device


@pytest.mark.parametrize("text", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": 3}'])
def test_an_answer_of_nccl_that_is_not_understood_is_rejected(text: bytes) -> None:
    """It must not count as a rank without collectives on its GPU."""
    with pytest.raises(ValueError, match="Flight Recorder answers not understood"):
        join_recordings(recording(gloo_entry()).encode(), text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the text"),
        ("[]", "the text"),
        (b"\xff\xfe", "the text"),
        ("{}", "entries"),
        (recording(gloo_entry(collective_seq_id=-1)), "entries.0.collective_seq_id"),
        (recording(gloo_entry(), gloo_entry(process_group=["0"])), "entries.1.process_group"),
        (recording(gloo_entry(input_sizes="7")), "entries.0.input_sizes"),
        (recording(pg_config={"0": {"ranks": "[0, 1"}}), "pg_config.0.ranks"),
        (recording(pg_config={"0": {"ranks": '["a"]'}}), "pg_config.0.ranks"),
    ],
)
def test_a_malformed_answer_is_rejected_with_one_line(text: str | bytes, where: str) -> None:
    """The error names the wrong field."""
    with pytest.raises(ValueError, match=where) as caught:
        parse_recording(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "raws"),
    [
        ("all_reduce", ["allreduce", "allreduce_coalesced", "gloo:all_reduce", "gloo:sparse_all_reduce"]),
        ("all_gather", ["allgather", "_allgather_base", "allgather_coalesced", "all_gather_single",
                        "allgather_into_tensor_coalesced", "nccl:_all_gather_base", "gloo:all_gather",
                        "nccl:all_gather_into_tensor_coalesced"]),
        ("all_to_all", ["alltoall", "alltoall_base", "all_to_all_single", "gloo:all_to_all"]),
        ("reduce_scatter", ["reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
                            "reduce_scatter_single", "nccl:_reduce_scatter_base"]),
        ("broadcast", ["broadcast", "nccl:_broadcast_oop"]),
        ("reduce", ["reduce", "nccl:_reduce_oop"]),
        ("barrier", ["barrier", "nccl:all_reduce_barrier", "gloo:barrier"]),
        ("gather", ["gather"]), ("scatter", ["scatter"]),
        ("send", ["nccl:send 0->1"]), ("recv", ["nccl:recv 0<-1", "gloo:recvAnySource"]),
        ("coalesced", ["nccl:coalesced"]), ("backward", ["backward"]), ("", [""]),
    ],
)  # fmt: skip
def test_both_sources_use_the_same_operation_names(name: str, raws: list[str]) -> None:
    """Names of the recorder and methods of ProcessGroup compare equal."""
    assert {operation_name(raw) for raw in raws} == {name}


def test_both_sources_use_the_same_dtype_names() -> None:
    """Python's names become the recorder's; unknown names are unchanged."""
    assert [dtype_name(raw) for raw in ("torch.bfloat16", "int64", "Float", "Odd")] == [
        "BFloat16", "Long", "Float", "Odd",
    ]  # fmt: skip


def test_merging_takes_each_field_from_its_source() -> None:
    """Operation and progress come from the recorder; line, step, members and waiting from the log."""
    recorded = collective(4, thread="9")
    note = collective(
        4,
        "reduce_scatter",
        sizes=(),
        dtypes=(),
        progress=CollectiveProgress.waiting,
        location=LINE,
        step=3,
        members=(0, 1),
    )
    assert merge([recorded], [note]) == (
        collective(4, thread="9", progress=CollectiveProgress.waiting, location=LINE, step=3, members=(0, 1)),
    )


@pytest.mark.parametrize("noted", list(CollectiveProgress))
def test_merging_takes_completion_from_the_recorder(noted: CollectiveProgress) -> None:
    """NCCL's `wait` returns early, and a log entry may be updated late: the recorder decides both."""
    done = collective(1, progress=CollectiveProgress.completed)
    assert merge([done], [collective(1, progress=noted)]) == (done,)
    (merged,) = merge([collective(1)], [collective(1, progress=noted)])
    assert merged.progress is not CollectiveProgress.completed


def test_merging_keeps_the_order_and_entries_of_one_source() -> None:
    """Older log entries come first, C++'s collectives keep their position, newer log entries follow."""
    recorded = [collective(3), collective(4), collective(1, group="v"), collective(5)]
    noted = [collective(n) for n in (1, 2, 3)] + [collective(1, group="v"), collective(6)]
    keys = [(record.group, record.sequence) for record in merge(recorded, noted)]
    assert keys == [("0", 1), ("0", 2), ("0", 3), ("0", 4), ("v", 1), ("0", 5), ("0", 6)]


def test_merging_keeps_all_entries_when_the_orders_differ() -> None:
    """Two threads may be recorded in one order and logged in the other."""
    recorded = [collective(1), collective(1, group="b"), collective(2)]
    noted = [collective(1, group="b", step=5), collective(1, step=5), collective(3)]
    merged = merge(recorded, noted)
    assert [(r.group, r.sequence, r.step) for r in merged] == [
        ("0", 1, 5),
        ("b", 1, 5),
        ("0", 2, -1),
        ("0", 3, -1),
    ]


def test_merging_without_a_recorder_keeps_the_log() -> None:
    """Without a log, the recorder's entries are unchanged."""
    notes = [collective(1), collective(2)]
    assert merge([], notes) == merge(notes, []) == tuple(notes)


def test_the_line_of_a_backward_is_kept_when_its_all_reduce_is_recorded() -> None:
    """The first gradient bucket has the sequence number of the log entry, and no line of its own."""
    note = collective(2, "backward", sizes=(), dtypes=(), location=LINE)
    (merged,) = merge([collective(2)], [note])
    assert (merged.operation, merged.location) == ("all_reduce", LINE)


def test_a_backward_without_a_reduction_is_replaced() -> None:
    """Under `no_sync`, the next operation gets the sequence number at which the backward was logged."""
    notes = [collective(2, "backward", sizes=(), dtypes=()), collective(2, "all_gather")]
    assert merge([], notes) == (notes[1],)


def test_sends_and_collectives_of_one_number_are_not_joined() -> None:
    """Point-to-point operations have their own numbers."""
    send = collective(1, "send", point_to_point=True)
    assert merge([send], [collective(1, location=LINE)]) == (send, collective(1, location=LINE))


@pytest.mark.parametrize(
    ("one", "other", "meets"),
    [
        ({}, {}, True),
        ({}, {"operation": "all_gather"}, False),
        ({}, {"sizes": ((8,),)}, False),
        ({"sizes": ((2, 3),)}, {"sizes": ((6,),)}, True),
        ({"sizes": ((2,), (3,))}, {"sizes": ((5,),), "dtypes": ("Float", "Float")}, True),
        ({}, {"dtypes": ("Half",)}, False),
        ({}, {"sizes": (), "dtypes": ()}, True),
        ({"sizes": ((),)}, {"sizes": ((2,),)}, False),
        ({"operation": "gather"}, {"operation": "gather", "sizes": ((9,),)}, True),
        ({"operation": "scatter", "sizes": (), "dtypes": ()}, {"operation": "scatter"}, True),
        ({"operation": "all_to_all"}, {"operation": "all_to_all", "sizes": ((9,),)}, True),
        ({"operation": "barrier"}, {"operation": "barrier", "sizes": (), "dtypes": ()}, True),
        ({"operation": "backward", "sizes": (), "dtypes": ()}, {}, True),
        ({"operation": "backward"}, {"operation": "broadcast", "sizes": ((1,),)}, True),
        ({"operation": "backward"}, {"operation": "backward"}, True),
        ({"operation": "backward"}, {"operation": "barrier"}, False),
        ({"operation": "coalesced", "sizes": ()}, {"operation": "all_gather"}, True),
        ({"operation": "reduce_scatter"}, {}, True),
        ({"operation": "reduce_scatter"}, {"sizes": ((8,),)}, True),
        ({"operation": "reduce_scatter"}, {"operation": "reduce_scatter", "sizes": ((8,),)}, False),
        ({"dtypes": ("Int",)}, {}, True),
        ({"dtypes": ("Odd",)}, {}, True),
        ({"operation": "broadcast"}, {"operation": "broadcast", "sizes": ((8,),)}, True),
        (
            {"sizes": ((7,), (1,)), "dtypes": ("Float", "Half")},
            {"sizes": ((15,),), "dtypes": ("Half",)},
            True,
        ),
        (
            {"sizes": ((7,), (1,)), "dtypes": ("Float", "Half")},
            {"sizes": ((16,),), "dtypes": ("Half",)},
            False,
        ),
    ],
)
def test_which_operations_can_meet(one: dict[str, Any], other: dict[str, Any], meets: bool) -> None:
    """Only a difference that prevents completion counts; an unknown value is no difference."""
    first, second = collective(**one), collective(**other)
    assert can_meet(first, second) is can_meet(second, first) is meets


def test_groups_of_one_name_without_a_common_rank_are_different() -> None:
    """torch may give both halves of a split the same name."""
    first, second = collective(members=(0, 1)), collective(members=(2, 3))
    assert not share_group(0, first, 2, second)
    assert share_group(0, first, 1, first)
    assert not share_group(0, first, 2, collective())
    assert share_group(0, collective(), 2, collective())


@pytest.mark.parametrize("said", [{}, {"timeout_ms": 0}, {"timeout_ms": -1}])
def test_a_missing_timeout_is_infinite(said: dict[str, int]) -> None:
    """It is not a timeout of zero, which would exclude every collective from proof."""
    entry = {key: value for key, value in gloo_entry().items() if key != "timeout_ms"} | said
    (read,) = parse_recording(recording(entry))
    assert read.timeout_seconds == math.inf


def numbered(*numbers: int, group: str = "5") -> list[dict[str, Any]]:
    """All-reduces of one group with these sequence numbers."""
    return [gloo_entry(collective_seq_id=number, process_group=[group, ""]) for number in numbers]


def test_a_group_whose_numbers_decrease_is_excluded_from_proof() -> None:
    """It was destroyed and created again; all its records are excluded, and no other group's."""
    read = parse_recording(recording(*numbered(7, 8, 1, 2), *numbered(1, 2, 3, group="0")))
    assert [(record.group, record.point_to_point) for record in read] == [("5", True)] * 4 + [
        ("0", False)
    ] * 3
    found = parse_recording(recording(*numbered(7, 1, 9)))
    assert {record.point_to_point for record in found} == {True}


def test_numbers_of_sends_and_backwards_do_not_decrease() -> None:
    """Sends count separately; a backward has the number of the all-reduce that follows."""
    send = gloo_entry(is_p2p=True, p2p_seq_id=1, process_group=["5", ""], profiling_name="gloo:send")
    read = parse_recording(recording(*numbered(7), send, *numbered(8)))
    assert [record.point_to_point for record in read] == [False, True, False]
    noted = [collective(9, BACKWARD), collective(8), collective(9)]
    assert not any(record.point_to_point for record in merge([], noted))


def test_log_entries_of_a_group_whose_numbers_decrease_are_excluded_from_proof() -> None:
    """Even if the recorder, which holds fewer entries, has only seen the new group."""
    noted = [collective(number) for number in (7, 1)]
    assert [record.point_to_point for record in merge([], noted)] == [True, True]


def test_the_waiter_is_taken_from_the_log() -> None:
    """The recorder knows the thread that issued the collective; another thread may wait."""
    record = collective(thread="1", timeout_seconds=5.0)
    (joined,) = merge([record], [collective(progress=CollectiveProgress.waiting, thread="2")])
    assert (joined.thread, joined.progress) == ("2", CollectiveProgress.waiting)
    assert joined.timeout_seconds == 5.0
    (joined,) = merge([record], [collective(thread="2", timeout_seconds=0.0)])
    assert (joined.thread, joined.timeout_seconds) == ("1", 0.0)
