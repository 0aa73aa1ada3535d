"""What proves a deadlock, what does not, and how it is described."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.completion import can_meet
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.history import merge
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.deadlocks.recording import parse_recording
from grpo_run.watchdog.verdict import Location

Call = tuple[str, str, int, int]  # group, operation, line, elements

GATHER: Call = ("0", "all_gather", 88, 3)
REDUCE: Call = ("0", "all_reduce", 91, 7)
LATER: Call = ("0", "all_reduce", 95, 7)
VOTE: Call = ("grpo_run/vote", "all_reduce", 12, 4)
STEP = [GATHER, REDUCE, VOTE]
PAST = STEP * 3


def at_line(line: int) -> Location:
    """A line of the user's script."""
    return Location(file="/home/user/train.py", line=line, function="main")


def ran(
    calls: Sequence[Call], *, last: CollectiveProgress = CollectiveProgress.waiting, **changes: Any
) -> tuple[Collective, ...]:
    """What a rank enqueued that made these calls; all but the last completed."""
    counts: Counter[str] = Counter()
    records = []
    for index, (group, operation, line, elements) in enumerate(calls):
        counts[group] += 1
        records.append(
            Collective(
                group=group, sequence=counts[group], operation=operation, sizes=((elements,),), dtypes=("Float",),
                progress=last if index == len(calls) - 1 else CollectiveProgress.completed, location=at_line(line),
            )
        )  # fmt: skip
    if changes:
        records[-1] = replace(records[-1], **changes)
    return tuple(records)


def judge(
    *records: tuple[Collective, ...] | Position | None, world_size: int | None = None
) -> Deadlock | None:
    """The proof for these ranks, in order. All threads of a rank that is given by its records wait."""
    positions = {
        rank: replace(given, rank=rank)
        if isinstance(given, Position)
        else without_other_threads(Position(rank=rank, records=given))
        for rank, given in enumerate(records)
    }
    return prove(positions, world_size=world_size or len(positions))


def after_exit(calls: Sequence[Call]) -> Position:
    """A rank whose script ended after these calls."""
    return Position(rank=0, records=ran(calls, last=CollectiveProgress.completed), exited=True)


def test_different_operations_at_one_place_are_a_mismatch() -> None:
    """Between two ranks, the earlier steps tell which is at fault."""
    found = judge(ran([*PAST, GATHER, LATER]), ran([*PAST, GATHER, GATHER]), ran([*PAST, GATHER, LATER]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (1,), (0, 2))
    assert (
        found.mismatch
        == "all_gather of 3 float32 elements against all_reduce of 7 float32 elements at #8 of group 0"
    )
    assert found.sentence == (
        "Deadlock: rank 1 is in all_gather (train.py:88, #8) while ranks 0 and 2 are in all_reduce (train.py:95, #8)."
    )
    assert found.locations == {0: at_line(95), 1: at_line(88), 2: at_line(95)}


def test_a_mismatch_with_an_exited_rank_is_decided_by_the_records() -> None:
    """Gloo may abort the rank that is right, so the order of exits says nothing."""
    aborted = Position(rank=0, records=ran([*PAST, GATHER]), exited=True)
    found = judge(aborted, ran([*PAST, LATER]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (1,), ())
    wrong = Position(rank=0, records=ran([*PAST, LATER]), exited=True)
    found = judge(wrong, ran([*PAST, GATHER]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (0,), (1,))
    found = judge(Position(rank=0, records=ran([REDUCE]), exited=True), ran([GATHER]))
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, ())


def test_a_mismatch_with_one_rank_that_outside_training_is_an_early_exit() -> None:
    """It is outside `train()`, and its next collective coincides with the gather of the other ranks."""
    away = without_other_threads(Position(rank=0, records=ran([*PAST, LATER]), outside_training=True))
    stays = ran([*PAST, GATHER])
    found = judge(stays, away)
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.rank_exited_early, (1,), (0,))
    assert (
        found.mismatch
        == "all_reduce of 7 float32 elements against all_gather of 3 float32 elements at #7 of group 0"
    )
    both = judge(Position(rank=0, records=stays, outside_training=True), away)
    assert both is not None
    assert both.cause is Cause.collective_mismatch


def test_two_ranks_without_earlier_steps_cannot_be_told_apart() -> None:
    """Their first collectives differ."""
    found = judge(ran([REDUCE]), ran([GATHER]))
    assert found is not None
    assert (found.culprits, found.waiters) == ((), (0, 1))
    assert found.sentence == (
        "Deadlock: rank 0 is in all_reduce (train.py:91, #1) while rank 1 is in all_gather (train.py:88, #1)"
        "; the records do not tell which is at fault."
    )


@pytest.mark.parametrize("change", [{"sizes": ((9,),)}, {"dtypes": ("Half",)}])
def test_different_inputs_are_a_mismatch(change: dict[str, Any]) -> None:
    """The same operation with another number of elements, or another dtype."""
    found = judge(ran([*PAST, GATHER]), ran([*PAST, GATHER], **change))
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, (1,))
    assert "all_gather of 3 float32 elements (train.py:88, #7)" in found.sentence


def test_inputs_that_may_differ_are_no_mismatch() -> None:
    """A gather accepts a different size from each rank."""
    call: Call = ("0", "gather", 70, 3)
    assert judge(ran([call]), ran([call], sizes=((9,),))) is None


def test_completed_operations_are_no_mismatch() -> None:
    """Operations that completed are no deadlock, whatever their names are."""
    assert (
        judge(
            ran([GATHER], last=CollectiveProgress.completed), ran([REDUCE], last=CollectiveProgress.completed)
        )
        is None
    )


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_logged_backward_against_a_gather_is_a_mismatch_if_a_rank_is_gone(aborted: int) -> None:
    """One rank was aborted where DDP would have all-reduced and the other rank gathers."""
    backward = ran([*PAST, ("0", "backward", 91, 0)], last=CollectiveProgress.enqueued, sizes=(), dtypes=())
    records = [ran([*PAST, GATHER]), backward]
    positions = [Position(rank=r, records=records[r], exited=r == aborted) for r in (0, 1)]
    found = judge(*positions)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, (1,))
    positions[0] = replace(positions[0], records=ran([*PAST, LATER]))
    found = judge(*positions)
    assert found is None or found.cause is not Cause.collective_mismatch


def test_a_logged_backward_of_running_ranks_proves_no_mismatch() -> None:
    """The position of its all-reduces is an estimate: with `no_sync` or unused layers there may be none."""
    backward = ran([*PAST, ("0", "backward", 91, 0)], last=CollectiveProgress.enqueued, sizes=(), dtypes=())
    assert judge(ran([*PAST, GATHER]), backward) is None
    third = Position(rank=2, records=None, exited=True)
    assert judge(ran([*PAST, GATHER]), backward, third) is None


@pytest.mark.parametrize("hasty", [0, 1])
def test_a_collective_with_a_short_timeout_is_no_mismatch(hasty: int) -> None:
    """It fails by itself, and the script expects that, whichever of the two operations it is."""
    calls = [[*PAST, GATHER], [*PAST, LATER]]
    timeouts = [math.inf, math.inf]
    timeouts[hasty] = 59.9
    records = [ran(c, timeout_seconds=t) for c, t in zip(calls, timeouts, strict=True)]
    assert judge(*records) is None
    patient = [ran(c, timeout_seconds=60.0) for c in calls]
    assert judge(*patient) is not None


def test_a_collective_with_a_short_timeout_is_no_circular_wait() -> None:
    """It does not wait for an exited rank either."""
    asks = ran([*PAST, GATHER, REDUCE], timeout_seconds=5.0)
    assert judge(asks, ran([*PAST, GATHER, VOTE])) is None
    assert judge(ran([*PAST, GATHER, REDUCE], timeout_seconds=60.0), ran([*PAST, GATHER, VOTE])) is not None
    assert judge(after_exit(PAST), ran([*PAST, GATHER], timeout_seconds=5.0)) is None
    assert judge(after_exit(PAST), ran([*PAST, GATHER], timeout_seconds=60.0)) is not None


def test_a_rank_with_a_thread_that_may_act_is_not_stuck() -> None:
    """The thread may serve the group that the other rank waits in, whether or not it has ever used it."""
    waits, votes = ran([*PAST, GATHER, REDUCE], thread="9"), ran([*PAST, GATHER, VOTE], thread="1")
    for threads, proved in (
        (frozenset({"1"}), True),
        (None, False),
        (frozenset(), False),
        (frozenset({"1", "2"}), False),
    ):
        found = judge(waits, Position(rank=1, records=votes, waiting_threads=threads))
        assert (found is not None) is proved


def test_a_thread_that_waits_where_nothing_is_known_keeps_its_rank_alive() -> None:
    """Its collective may complete: the group is excluded, or the collective has a time limit."""
    odd: Call = ("odd", "all_reduce", 40, 1)
    for change in ({"point_to_point": True}, {"timeout_seconds": 0.0}):
        calls = ran([*PAST, odd, GATHER, VOTE], thread="1")
        elsewhere = replace(calls[-3], progress=CollectiveProgress.waiting, thread="2", **change)
        votes = (*calls[:-3], elsewhere, *calls[-2:])
        known, unknown = (
            judge(
                ran([*PAST, GATHER, REDUCE], thread="9"),
                Position(rank=1, records=votes, waiting_threads=threads),
            )
            for threads in (frozenset({"1"}), frozenset({"1", "2"}))
        )
        assert known is not None
        assert unknown is None


def test_a_rank_whose_other_thread_will_go_on_is_not_stuck() -> None:
    """One thread waits for the other rank; the other waits in a collective that all have enqueued."""
    served: Call = ("side", "all_reduce", 40, 1)
    both = ran([*PAST, served, GATHER, VOTE], thread="1")
    both = (*both[:-3], replace(both[-3], progress=CollectiveProgress.waiting, thread="2"), *both[-2:])
    threads = frozenset({"1", "2"})
    waits = ran([*PAST, served, GATHER, REDUCE], thread="9")
    assert judge(waits, Position(rank=1, records=both, waiting_threads=threads)) is None
    late = ran([*PAST, GATHER, REDUCE], thread="9")
    assert judge(late, Position(rank=1, records=both, waiting_threads=threads)) is not None


def test_a_skipped_collective_ends_as_a_mismatch() -> None:
    """The rank is one collective ahead in the same group."""
    found = judge(ran([*PAST, GATHER]), ran([*PAST, REDUCE]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (1,), (0,))


def test_a_skipped_last_collective_is_a_circular_wait_with_the_vote() -> None:
    """The rank votes while the others reduce; each waits for the other."""
    found = judge(ran([*PAST, GATHER, REDUCE]), ran([*PAST, GATHER, VOTE]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_missing_rank, (1,), (0,))
    assert found.mismatch is None
    assert found.sentence == (
        "Deadlock: rank 1 is in all_reduce (train.py:12, #4 of group grpo_run/vote) while rank 0 is in "
        "all_reduce (train.py:91, #8)."
    )


def test_a_circular_wait_with_rank_zero_at_fault() -> None:
    """Analysis that takes rank 0 as reference would blame the three others."""
    right = ran([*PAST, GATHER, REDUCE])
    found = judge(ran([*PAST, GATHER, VOTE]), right, right, right)
    assert found is not None
    assert (found.culprits, found.waiters) == ((0,), (1, 2, 3))


def test_two_groups_in_opposite_order_are_a_circular_wait() -> None:
    """Before any common step it is a deadlock without a culprit."""
    one, two = ("a", "all_reduce", 10, 1), ("b", "all_reduce", 11, 1)
    found = judge(ran([one]), ran([two]))
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_missing_rank, ())
    assert found.sentence.endswith("; the records do not tell which is at fault.")


def test_a_rank_that_has_exited_is_the_culprit() -> None:
    """Its script has run its last line while the others wait for it."""
    found = judge(ran([*PAST, GATHER]), after_exit(PAST), ran([*PAST, GATHER]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.rank_exited_early, (1,), (0, 2))
    assert found.sentence == (
        "Deadlock: rank 1 has exited while ranks 0 and 2 wait for it in all_gather (train.py:88, #7)."
    )


ASK: Call = ("grpo_run/consensus", "all_gather", 40, 33)


def test_a_rank_that_left_a_consensus_loop_for_a_collective_is_named_with_its_last_call() -> None:
    """Both lines, and how often each rank has called."""
    found = judge(ran([ASK] * 5), ran([*[ASK] * 4, GATHER]))
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_missing_rank, (1,))
    assert found.sentence == (
        "Deadlock: rank 1 is in all_gather (train.py:88, #1) while rank 0 is in consensus (train.py:40, call 5)."
        " The last consensus call of rank 1 was call 4 at train.py:40."
    )


def test_a_rank_that_left_a_consensus_loop_for_the_end_is_named_with_its_last_call() -> None:
    """Its script has run its last line."""
    found = judge(ran([ASK, ASK]), after_exit([ASK]))
    assert found is not None
    assert (found.cause, found.culprits, found.waiters) == (Cause.rank_exited_early, (1,), (0,))
    assert found.sentence == (
        "Deadlock: rank 1 has exited while rank 0 waits for it in consensus (train.py:40, call 2)."
        " The last consensus call of rank 1 was call 1 at train.py:40."
    )


def test_ranks_that_wait_for_a_stuck_rank_are_stuck_too() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which has exited."""
    pair = ran([*PAST, ("pair", "all_reduce", 50, 2)], members=(0, 1))
    found = judge(pair, ran([*PAST, GATHER]), after_exit(PAST))
    assert found is not None
    assert (found.culprits, found.waiters) == ((2,), (0, 1))


def test_a_rank_that_outside_training_and_waits_elsewhere_exited_early() -> None:
    """It waits in another group while the others continue training."""
    away = without_other_threads(
        Position(rank=0, records=ran([*PAST, ("end", "barrier", 120, 0)]), outside_training=True)
    )
    found = judge(ran([*PAST, GATHER]), away)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))
    assert found.sentence.startswith(
        "Deadlock: rank 1 has left training while rank 0 waits for it in all_gather"
    )


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


def in_backward(calls: Sequence[Call], reduced: int = 1) -> Position:
    """A rank whose main thread sleeps in a backward pass, with its last collectives issued by C++."""
    records = ran(calls, last=CollectiveProgress.enqueued)
    native = tuple(
        replace(record, progress=CollectiveProgress.enqueued, in_backward=True)
        for record in records[-reduced:]
    )
    return without_other_threads(Position(rank=0, records=(*records[:-reduced], *native), in_backward=True))


def test_a_main_thread_that_sleeps_in_a_backward_is_blocked() -> None:
    """C++ waits for gradients without a log entry."""
    stuck = in_backward([*PAST, GATHER, REDUCE])
    votes = ran([*PAST, GATHER, VOTE])
    found = judge(stuck, votes)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_missing_rank, (1,))
    assert judge(replace(stuck, in_backward=False), votes) is None
    assert judge(replace(stuck, waiting_threads=None), votes) is None


def test_a_pending_vote_does_not_block_a_backward() -> None:
    """It was started before the backward pass and is collected later; only what C++ issued counts."""
    records = ran([*PAST, VOTE], last=CollectiveProgress.enqueued)
    busy = without_other_threads(Position(rank=0, records=records, in_backward=True))
    assert judge(busy, ran([*PAST, GATHER])) is None


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


def test_an_exited_rank_outside_the_group_is_not_awaited() -> None:
    """The members are known, or seen, and the exited rank is none of them."""
    pair: Call = ("pair", "all_reduce", 50, 2)
    early = ran([*PAST, pair], last=CollectiveProgress.completed)
    assert judge(ran([*PAST, pair, pair]), early, after_exit(PAST)) is None
    assert (
        judge(
            ran([*PAST, pair], members=(0, 1)), ran(PAST, last=CollectiveProgress.completed), after_exit(PAST)
        )
        is None
    )
    assert judge(ran([*PAST, pair]), ran(PAST, last=CollectiveProgress.completed), after_exit(PAST)) is None


def test_halves_of_a_split_with_one_name_are_not_compared() -> None:
    """torch may give both halves one name; their operations need not match."""
    one = ran([("half", "all_gather", 1, 1)], members=(0, 1))
    other = ran([("half", "all_reduce", 2, 1)], members=(2, 3))
    assert judge(one, (), other, ()) is None


def test_sends_are_not_compared() -> None:
    """Point-to-point numbers are not the group's."""
    send = ran([("0", "send", 1, 1)], point_to_point=True)
    receive = ran([("0", "recv", 2, 1)], point_to_point=True)
    assert judge(send, receive) is None


def test_a_tie_of_four_names_no_rank() -> None:
    """All four ranks wait, without earlier steps."""
    found = judge(ran([REDUCE]), ran([GATHER]), ran([GATHER]), ran([REDUCE]))
    assert found is not None
    assert (found.culprits, found.waiters) == ((), (0, 1, 2, 3))
    assert "ranks 0 and 3 are in all_reduce" in found.sentence


def test_many_ranks_are_named_as_a_range() -> None:
    """The sentence stays short with sixteen ranks."""
    found = judge(*[ran([GATHER])] * 7, ran([REDUCE]), *[ran([GATHER])] * 8)
    assert found is not None
    assert found.culprits == (7,)
    assert "while ranks 0 to 6 and 8 to 15 are in all_gather" in found.sentence


def test_the_stack_supplies_a_missing_line() -> None:
    """C++'s collectives have no line; the main thread's stack has one."""
    bare = Position(rank=0, records=ran([REDUCE], location=None), stack_location=at_line(300))
    found = judge(bare, ran([GATHER]))
    assert found is not None
    assert "train.py:300" in found.sentence
    assert found.locations[0] == at_line(300)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_recorder_answers_and_logs_are_a_proof(backend: str) -> None:
    """From the recorders' JSON and the collective logs to the proof, for either backend."""

    def answer(names: Sequence[str]) -> str:
        entries = [
            {
                "process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": number, "p2p_seq_id": 0,
                "is_p2p": False, "profiling_name": f"{backend}:{name}", "input_sizes": [[7]],
                "input_dtypes": ["Float"], "retired": number < len(names), "thread_id": "1",
                "state": "scheduled" if backend == "gloo" else "started" if number == len(names) else "completed",
            }
            for number, name in enumerate(names, 1)
        ]  # fmt: skip
        ranks = "[]" if backend == "gloo" else "[0, 1]"
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        return json.dumps({"entries": entries, "pg_config": config, "pg_status": {}, "version": "2.10"})

    gather = "all_gather" if backend == "gloo" else "_all_gather_base"
    waits = ran([("0", "barrier", 5, 0)] * 6 + [("0", "all_gather", 88, 7)])[-1:]
    one = merge(parse_recording(answer([gather, "all_reduce"] * 3 + [gather])), waits)
    other = parse_recording(answer([gather, "all_reduce"] * 3 + ["all_reduce"]))
    found = judge(one, other)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, (1,))
    assert (
        found.mismatch
        == "all_reduce of 7 float32 elements against all_gather of 7 float32 elements at #7 of group 0"
    )


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


GROUPS = ("0", "grpo_run/vote", "pair", "odd")


def members_of(group: str, world: int) -> tuple[int, ...]:
    """Two groups of all ranks, one of the first two, one of the first and the last."""
    return {"pair": (0, 1), "odd": (0, world - 1)}.get(group, tuple(range(world)))


@st.composite
def same_program(draw: st.DrawFn) -> tuple[dict[int, Position], int]:
    """Ranks somewhere in one program, with anything pending, waiting and retained that may be."""
    world = draw(st.integers(2, 4))
    program = draw(st.lists(st.tuples(st.sampled_from(GROUPS), st.sampled_from(["all_reduce", "all_gather", "backward"]),
                                      st.integers(1, 3)), min_size=1, max_size=12))  # fmt: skip
    reached = [draw(st.integers(0, len(program))) for _ in range(world)]
    knows = draw(st.sets(st.sampled_from(GROUPS)))
    firsts = {
        group
        for group in GROUPS
        if min(reached[member] for member in members_of(group, world))
        <= next((i for i, call in enumerate(program) if call[0] == group), 0)
    }
    positions = {}
    for rank in range(world):
        counts: Counter[str] = Counter()
        records = []
        for index, (group, operation, elements) in enumerate(program[: reached[rank]]):
            members = members_of(group, world)
            if rank not in members:
                continue
            counts[group] += 1
            met = all(reached[member] > index for member in members)
            # A collective that all have enqueued may not have completed yet.
            done = met and (counts[group] == 1 or draw(st.booleans()))
            sizes = () if operation == "backward" else ((elements,),)
            records.append(
                Collective(
                    group=group, sequence=counts[group], operation=operation, sizes=sizes, dtypes=(),
                    progress=CollectiveProgress.completed if done else CollectiveProgress.enqueued,
                    members=members if group in knows else (), location=at_line(index),
                )
            )  # fmt: skip
        pending = [i for i, record in enumerate(records) if record.progress is CollectiveProgress.enqueued]
        if pending and draw(st.booleans()):
            waited = draw(st.sampled_from(pending))
            records[waited] = replace(records[waited], progress=CollectiveProgress.waiting)
        ended = reached[rank] == len(program) and not pending
        kept = tuple(records[-draw(st.integers(1, 12)) :])
        # A ring holds hundreds: no rank is that far ahead of one that is still in a group's first collective.
        forgotten = {record.group for record in records} - {record.group for record in kept}
        kept = tuple(r for r in records if r in kept or r.group in forgotten & firsts)
        positions[rank] = Position(
            rank=rank,
            records=None if draw(st.integers(0, 9)) == 0 else kept,
            exited=ended and draw(st.booleans()),
            outside_training=ended and draw(st.booleans()),
            in_backward=draw(st.booleans()),
        )
        if draw(st.booleans()):
            positions[rank] = without_other_threads(positions[rank])
    return positions, world


@given(same_program())
def test_ranks_of_one_program_are_never_deadlocked(drawn: tuple[dict[int, Position], int]) -> None:
    """No false proof: ranks anywhere in the same program are late, never deadlocked."""
    positions, world = drawn
    assert prove(positions, world_size=world) is None


def stopped(programs: Sequence[Sequence[Call]]) -> dict[int, Position]:
    """Run each rank's calls, each waiting for all members of its group, until no rank can continue."""
    world = len(programs)
    done = [0] * world
    records = [list(ran(program)) for program in programs]

    def meets(rank: int) -> bool:
        if done[rank] == len(programs[rank]):
            return False
        here = records[rank][done[rank]]
        for other in members_of(here.group, world):
            place = next((i for i, r in enumerate(records[other])
                          if (r.group, r.sequence) == (here.group, here.sequence)), None)  # fmt: skip
            if place is None or place > done[other] or not can_meet(here, records[other][place]):
                return False
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(world):
            while meets(rank):
                done[rank] += 1
                moved = True
    positions = {}
    for rank in range(world):
        past = [replace(r, progress=CollectiveProgress.completed) for r in records[rank][: done[rank]]]
        here = [
            replace(r, progress=CollectiveProgress.waiting)
            for r in records[rank][done[rank] : done[rank] + 1]
        ]
        filled = tuple(replace(r, members=members_of(r.group, world)) for r in (*past, *here))
        positions[rank] = without_other_threads(Position(rank=rank, records=filled, exited=not here))
    return positions


@given(st.data())
def test_a_rank_that_skips_a_call_is_named_or_no_rank_is(data: st.DataObject) -> None:
    """After some complete steps, one rank skips one call: the proof names this rank or none."""
    world = data.draw(st.integers(2, 4))
    kinds = st.tuples(
        st.sampled_from(GROUPS), st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 3)
    )
    drawn = data.draw(st.lists(kinds, min_size=2, max_size=6))
    step: list[Call] = [(group, operation, 20 + i, size) for i, (group, operation, size) in enumerate(drawn)]
    steps, skipper = data.draw(st.integers(2, 4)), data.draw(st.integers(0, world - 1))
    programs = [
        [call for _ in range(steps) for call in [*step, VOTE] if rank in members_of(call[0], world)]
        for rank in range(world)
    ]
    own_step = len(programs[skipper]) // steps
    left_out = data.draw(st.integers(own_step, len(programs[skipper]) - 1))
    del programs[skipper][left_out]
    found = prove(stopped(programs), world_size=world)
    assert found is not None
    assert found.culprits in {(), (skipper,)}


PAIR: Call = ("pair", "all_reduce", 50, 2)


def test_a_rank_that_exited_before_its_backward_reduced_is_missing() -> None:
    """The entry of a backward says that DDP will reduce; a rank that exited before that never enqueued it."""
    backward: Call = ("0", BACKWARD, 70, 7)
    expected = Position(rank=1, records=ran([*PAST, backward], last=CollectiveProgress.enqueued), exited=True)
    found = judge(ran([*PAST, REDUCE]), expected)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))


@pytest.mark.parametrize("operation", ["all_reduce", "barrier", "broadcast", "zeros"])
def test_a_rank_that_exited_inside_a_collective_had_enqueued_it(operation: str) -> None:
    """Only a backward's entry is a guess: any other open record counts, whatever its operation is called."""
    call: Call = ("0", operation, 70, 7)
    aborted = Position(rank=1, records=ran([*PAST, call], last=CollectiveProgress.enqueued), exited=True)
    assert judge(ran([*PAST, call]), aborted) is None


def test_a_backward_that_completed_was_enqueued() -> None:
    """The exited rank reduced its gradients, so nobody waits for it there."""
    backward: Call = ("0", BACKWARD, 70, 7)
    done = Position(rank=1, records=ran([*PAST, backward], last=CollectiveProgress.completed), exited=True)
    assert judge(ran([*PAST, REDUCE]), done) is None


@pytest.mark.parametrize("waiter", [0, 1])
def test_where_members_are_unknown_every_rank_seen_in_the_group_is_one(waiter: int) -> None:
    """One collective of a rank is enough, and the number of the rank does not matter."""
    waits = ran([*PAST, PAIR, PAIR])
    seen = Position(rank=0, records=ran([*PAST, PAIR], last=CollectiveProgress.completed), exited=True)
    other = ran(PAST, last=CollectiveProgress.completed)
    found = judge(*((waits, seen) if waiter == 0 else (seen, waits)), other)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1 - waiter,))


@pytest.mark.parametrize("waiter", [0, 1])
def test_a_rank_seen_in_the_group_is_waited_for_although_another_is_not_observed(waiter: int) -> None:
    """The unobserved rank may be a member too, but the one that exited will never come."""
    waits = ran([*PAST, PAIR, PAIR])
    seen = Position(rank=0, records=ran([*PAST, PAIR], last=CollectiveProgress.completed), exited=True)
    found = judge(*((waits, seen) if waiter == 0 else (seen, waits)), None)
    assert found is not None
    assert found.culprits == (1 - waiter,)


def test_a_group_in_which_nobody_else_was_seen_needs_every_other_rank_stuck() -> None:
    """One of the others is a member; as long as one of them runs or cannot be seen, it may still come."""
    waits = ran([*PAST, PAIR])
    assert judge(waits, after_exit(PAST), after_exit(PAST)) is not None
    assert judge(waits, after_exit(PAST), ran(PAST, last=CollectiveProgress.completed)) is None
    assert judge(waits, after_exit(PAST), None) is None
    assert judge(waits, after_exit(PAST), world_size=3) is None


def test_with_known_members_one_that_exited_is_enough() -> None:
    """The other member is only late, and the one that exited will never come."""
    found = judge(ran([*PAST, GATHER]), after_exit(PAST), ran(PAST, last=CollectiveProgress.completed))
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))


def test_with_known_members_an_unobserved_rank_is_late() -> None:
    """It holds up nothing, and hides nothing: the member that exited is still proof."""
    found = judge(ran([*PAST, GATHER]), after_exit(PAST), None)
    assert found is not None
    assert found.culprits == (1,)


def test_a_ring_that_forgot_the_group_is_believed_for_the_groups_first_collective_only() -> None:
    """A rank without a record of the group has not entered it, unless the ring may have dropped the record."""
    first = ran([*PAST, PAIR], members=(0, 1))
    assert judge(first, after_exit(PAST)) is not None
    second = ran([*PAST, PAIR, PAIR], members=(0, 1))
    assert judge(second, after_exit(PAST)) is None
    assert judge(second, Position(rank=1, records=(), exited=True)) is not None


def test_a_group_whose_first_collective_is_pending_has_not_begun() -> None:
    """A member without a record of it has not come, whichever of its collectives is waited for."""
    begun = ran([*PAST, PAIR, PAIR], members=(0, 1))
    pending = (
        *begun[:-2],
        replace(begun[-2], progress=CollectiveProgress.enqueued, members=(0, 1)),
        begun[-1],
    )
    assert judge(pending, after_exit(PAST)) is not None
    assert judge(begun, after_exit(PAST)) is None


def test_what_a_rank_has_issued_is_known_where_its_records_are_dropped() -> None:
    """It started the group's first collective long ago, and waits for this rank elsewhere."""
    first = ran([*PAST, PAIR], members=(0, 1))
    votes = without_other_threads(Position(rank=1, records=ran([*PAST, VOTE])))
    assert judge(first, votes) is not None
    assert judge(first, replace(votes, issued={"pair": 1, "0": 6})) is None


def test_a_broadcast_waits_for_its_root_only() -> None:
    """It may complete on a rank before the other receivers have come."""
    call: Call = ("0", "broadcast", 40, 3)
    waits = ran([*PAST, call], root=0)
    votes, late = ran([*PAST, VOTE]), ran(PAST, last=CollectiveProgress.completed)
    assert judge(votes, waits, late) is not None
    assert judge(late, waits, votes) is None
    assert judge(waits, votes, late) is None
    assert judge(votes, ran([*PAST, call]), late) is None


@pytest.mark.parametrize("operation", ["gather", "scatter", "all_to_all", "broadcast", "reduce"])
def test_an_operation_that_may_complete_alone_is_no_circle(operation: str) -> None:
    """It may move nothing between two ranks, or nothing that the receiver must wait for."""
    assert judge(ran([*PAST, ("0", operation, 40, 3)]), ran([*PAST, VOTE])) is None


def test_a_reduction_without_elements_is_no_circle() -> None:
    """Gloo completes it without communication."""
    assert judge(ran([*PAST, ("0", "all_reduce", 40, 0)]), ran([*PAST, VOTE])) is None
    assert judge(ran([*PAST, ("0", "barrier", 40, 0)]), ran([*PAST, VOTE])) is not None


def test_a_mismatch_that_nobody_waits_for_is_no_proof() -> None:
    """A program that never waits for the handle finishes."""
    ours, theirs = (ran([*PAST, call], last=CollectiveProgress.enqueued) for call in (GATHER, LATER))
    assert judge(ours, theirs) is None
    assert judge(ran([*PAST, GATHER], last=CollectiveProgress.completed), theirs) is None
    assert judge(ours, ran([*PAST, LATER])) is not None
    on_device = [tuple(replace(record, on_device=True) for record in records) for records in (ours, theirs)]
    assert judge(*on_device) is not None


def test_every_observed_rank_is_placed() -> None:
    """At the collective it waits for, else at its last one; a rank without records has no place."""
    runs = ran(PAST, last=CollectiveProgress.completed)
    found = judge(ran([*PAST, GATHER]), ran([*PAST, LATER]), runs, (), None)
    assert found is not None
    places = [(at.operation, at.sequence) if (at := found.at[rank]) else None for rank in range(5)]
    assert places == [("all_gather", 7), ("all_reduce", 7), ("all_reduce", 3), None, None]


def test_a_rank_is_placed_where_it_waits_and_not_where_it_last_enqueued() -> None:
    """A vote enqueued later does not hide the collective that blocks the rank."""
    apart: Call = ("apart", "all_reduce", 60, 1)
    records = ran([*PAST, apart, VOTE], last=CollectiveProgress.enqueued)
    waits = (*records[:-2], replace(records[-2], progress=CollectiveProgress.waiting), records[-1])
    found = judge(ran([*PAST, GATHER]), ran([*PAST, LATER]), waits)
    assert found is not None
    assert (at := found.at[2]) is not None
    assert at.group == "apart"


@pytest.mark.parametrize("completed", [0, 1])
def test_a_mismatch_with_one_side_completed_is_a_mismatch(completed: int) -> None:
    """The side that completed was given a wrong answer; the other waits for ever."""
    last = [CollectiveProgress.waiting, CollectiveProgress.waiting]
    last[completed] = CollectiveProgress.completed
    found = judge(ran([*PAST, GATHER], last=last[0]), ran([*PAST, LATER], last=last[1]))
    assert found is not None
    assert found.cause is Cause.collective_mismatch


def test_a_pair_that_can_meet_does_not_end_the_search() -> None:
    """Ranks 0 and 1 agree; rank 2 is the one that differs."""
    found = judge(ran([*PAST, GATHER]), ran([*PAST, GATHER]), ran([*PAST, LATER]))
    assert found is not None
    assert found.culprits == (2,)


@pytest.mark.parametrize("first", ["completed", "hasty", "nobody waits", "backward"])
def test_a_pair_that_proves_nothing_does_not_end_the_search(first: str) -> None:
    """Ranks 0 and 1 are compared first; rank 2 contradicts one of them."""
    enqueued, done = CollectiveProgress.enqueued, CollectiveProgress.completed
    backward = ran([*PAST, ("0", "backward", 91, 0)], last=enqueued, sizes=(), dtypes=())
    here = {
        "completed": (ran([*PAST, GATHER], last=done), ran([*PAST, GATHER], last=done)),
        "hasty": (ran([*PAST, GATHER]), ran([*PAST, LATER], timeout_seconds=5.0)),
        "nobody waits": (ran([*PAST, GATHER], last=enqueued), ran([*PAST, LATER], last=enqueued)),
        "backward": (backward, ran([*PAST, GATHER])),
    }[first]
    assert judge(*here) is None
    found = judge(*here, ran([*PAST, LATER]))
    assert found is not None
    assert found.cause is Cause.collective_mismatch


def test_a_receiver_is_held_up_by_its_root_only() -> None:
    """What another receiver has enqueued in that place does not concern it, as long as nobody waits for that."""
    waits = ran([*PAST, ("0", "broadcast", 40, 3)], root=0)
    other = ran([*PAST, GATHER], last=CollectiveProgress.enqueued)
    late = ran(PAST, last=CollectiveProgress.completed)
    assert judge(late, waits, other) is None
    found = judge(other, waits, late)
    assert found is not None
    assert found.cause is Cause.collective_mismatch


def test_a_mismatch_is_proved_in_a_group_whose_members_are_unknown() -> None:
    """Both ranks are in it, so each needs the other."""
    found = judge(ran([*PAST, PAIR]), ran([*PAST, ("pair", "all_gather", 51, 2)]))
    assert found is not None
    assert found.cause is Cause.collective_mismatch


def test_an_early_exit_is_one_by_some_ranks_and_not_by_all() -> None:
    """Of three ranks in a mismatch, two out of `train()` are to blame; all three are not."""
    away = Position(rank=0, records=ran([*PAST, LATER]), outside_training=True)
    stays = Position(rank=0, records=ran([*PAST, GATHER]))
    found = judge(stays, away, away)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1, 2))
    none_left = judge(stays, replace(away, outside_training=False))
    assert none_left is not None
    assert none_left.cause is Cause.collective_mismatch
    all_left = judge(replace(stays, outside_training=True), away, away)
    assert all_left is not None
    assert all_left.cause is Cause.collective_mismatch


def test_a_backward_waits_for_all_that_it_has_issued() -> None:
    """The first bucket is reduced by all ranks, the second one is missing."""
    stuck = in_backward([*PAST, GATHER, REDUCE, REDUCE], reduced=2)
    assert judge(stuck, ran([*PAST, GATHER, REDUCE, VOTE])) is not None
    assert judge(stuck, ran([*PAST, GATHER, REDUCE, REDUCE])) is None


def test_where_a_thread_is_unknown_only_the_oldest_wait_counts() -> None:
    """The later record may belong to the same thread, which would enqueue it only after the first completes."""
    waits = ran([*PAST, GATHER, VOTE], thread="vote")
    both = (*waits[:-2], replace(waits[-2], progress=CollectiveProgress.waiting), waits[-1])
    assert judge(both, ran([*PAST, GATHER, REDUCE])) is None


def test_every_known_thread_that_waits_is_blocked() -> None:
    """The first thread's collective will complete; the second waits for a rank that has exited."""
    calls: list[Call] = [("x", "all_reduce", 10, 1), ("y", "all_reduce", 20, 1)]
    waits = tuple(
        replace(record, members=(0, 1), thread=record.group, progress=CollectiveProgress.waiting)
        for record in ran(calls)
    )
    peer = tuple(
        replace(record, members=(0, 1)) for record in ran(calls[:1], last=CollectiveProgress.completed)
    )
    found = judge(waits, Position(rank=1, records=peer, exited=True))
    assert found is not None
    assert found.culprits == (1,)


def test_sends_do_not_make_a_group_ambiguous() -> None:
    """A group with sends and receives still proves what its collectives show."""
    send = ran([("0", "send", 1, 1)], point_to_point=True, last=CollectiveProgress.completed)
    found = judge((*send, *ran([*PAST, GATHER])), (*send, *ran([*PAST, LATER])))
    assert found is not None
    assert found.cause is Cause.collective_mismatch
