"""Which of the deadlocked ranks is at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_run.watchdog.deadlocks._culprit import find_culprits, find_departed_rank
from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.verdict import Location

Call = tuple[str, str, int | None, int]  # group, operation, line (None: issued from C++), elements

GATHER: Call = ("0", "all_gather", 88, 3)
REDUCE: Call = ("0", "all_reduce", 91, 7)
LATER: Call = ("0", "all_reduce", 95, 7)
VOTE: Call = ("grpo_run/vote", "all_reduce", 12, 4)
STEP = [GATHER, REDUCE, LATER, VOTE]


def ran(calls: Sequence[Call], *, keep: int | None = None) -> tuple[Collective, ...]:
    """What a rank enqueued that made these calls and waits in the last; the newest `keep` are retained."""
    counts: Counter[str] = Counter()
    records = []
    for index, (group, operation, line, elements) in enumerate(calls):
        counts[group] += 1
        last = index == len(calls) - 1
        records.append(
            Collective(
                group=group, sequence=counts[group], operation=operation, sizes=((elements,),),
                dtypes=("Float",),
                progress=CollectiveProgress.waiting if last else CollectiveProgress.completed,
                location=None if line is None else Location(file="/x/train.py", line=line, function="f"),
            )
        )  # fmt: skip
    return tuple(records[-keep:] if keep else records)


def culprits(*programs: Sequence[Call], keep: int | None = None) -> tuple[int, ...]:
    """Culprits among ranks that each wait in their program's last call."""
    records = {rank: ran(program, keep=keep) for rank, program in enumerate(programs)}
    stands = {rank: records[rank][-1] for rank in records}
    return find_culprits(stands, records, world_size=len(programs))


def test_a_minority_is_at_fault() -> None:
    """The operations differ."""
    assert culprits([*STEP, REDUCE], [*STEP, GATHER], [*STEP, REDUCE]) == (1,)


def test_rank_zero_can_be_the_minority() -> None:
    """Comparing all ranks with rank 0 would blame the healthy ones."""
    assert culprits([*STEP, REDUCE], [*STEP, GATHER], [*STEP, GATHER]) == (0,)


def test_rank_zero_of_two_can_be_at_fault() -> None:
    """With two ranks the earlier steps decide, regardless of the rank's number."""
    assert culprits([*STEP, *STEP, REDUCE], [*STEP, *STEP, GATHER]) == (0,)


def test_a_skipped_collective_is_recognized_by_the_line() -> None:
    """The ranks' all-reduces have the same number and different lines."""
    assert culprits([*STEP * 2, GATHER, REDUCE, LATER], [*STEP * 2, GATHER, LATER, VOTE]) == (1,)


def test_an_extra_collective_of_the_same_operation_is_at_fault() -> None:
    """It was issued at a line that no rank had used before, and shifts all later operations."""
    extra: Call = ("0", "all_reduce", 40, 7)
    assert culprits([*STEP * 2, GATHER, REDUCE, LATER, VOTE], [*STEP * 2, GATHER, extra, REDUCE, LATER]) == (
        1,
    )


def test_one_earlier_collective_is_no_context() -> None:
    """For a save that first coincides with a log, what follows the log's gather elsewhere says nothing."""
    saving: list[Call] = [REDUCE, VOTE, GATHER, VOTE]
    past = [*saving, *saving]
    assert culprits([*past, LATER, GATHER, REDUCE], [*past, LATER, GATHER, VOTE]) == ()


def test_no_rank_is_named_before_a_common_step() -> None:
    """The first collectives differ: there is nothing to compare with."""
    assert culprits([REDUCE], [GATHER]) == ()
    assert culprits([VOTE], [GATHER]) == ()


def test_two_new_calls_name_no_rank() -> None:
    """Both ranks depart after a common step."""
    assert culprits([*STEP, *STEP, ("0", "barrier", 70, 0)], [*STEP, *STEP, ("0", "broadcast", 71, 2)]) == ()


def test_two_usual_calls_name_no_rank() -> None:
    """After the same two calls, earlier steps continued in either way."""
    opening: list[Call] = [("0", "broadcast", line, 2) for line in (60, 61, 62)]
    past = [opening[0], GATHER, REDUCE, opening[1], GATHER, LATER, opening[2], GATHER]
    assert culprits([*past, REDUCE], [*past, LATER]) == ()


def test_a_tie_of_four_is_decided_by_earlier_steps() -> None:
    """The pair that departed from them is at fault."""
    wrong, right = [*STEP, *STEP, REDUCE], [*STEP, *STEP, GATHER]
    assert culprits(right, wrong, wrong, right) == (1, 2)


def test_a_tie_of_four_without_earlier_steps_names_no_rank() -> None:
    """They differ in the first collective."""
    assert culprits([REDUCE], [GATHER], [GATHER], [REDUCE]) == ()


def test_lines_break_a_tie() -> None:
    """Two ranks at one line are right, two ranks at two lines are not."""
    assert culprits([REDUCE], [GATHER], [("0", "all_gather", 89, 3)], [REDUCE]) == (1, 2)


def test_varying_sizes_name_no_rank() -> None:
    """A batch's padded length is new in each step, so a size that repeats proves nothing."""
    past = [call for n in (40, 50, 60, 70) for call in (("0", "all_gather", 88, n), VOTE)]
    assert culprits([*past, ("0", "all_gather", 88, 80)], [*past, ("0", "all_gather", 88, 70)]) == ()


def test_a_change_of_a_constant_size_is_at_fault() -> None:
    """The same line had the same sizes in every earlier step."""
    assert culprits([*STEP, *STEP, *STEP, GATHER], [*STEP, *STEP, *STEP, ("0", "all_gather", 88, 4)]) == (1,)


def test_varying_sizes_do_not_hide_a_skipped_call() -> None:
    """The line is usual although its size is new; the other rank's vote is usual, but not at this place."""

    def step(elements: int) -> list[Call]:
        return [VOTE, ("0", "all_gather", 88, elements)]

    past = [*step(40), *step(50), VOTE]
    assert culprits([*past, ("0", "all_gather", 88, 60)], [*past, VOTE]) == (1,)


def test_without_lines_the_operations_decide() -> None:
    """The recorder alone has no lines."""
    bare: list[Call] = [(group, operation, None, elements) for group, operation, _, elements in STEP]
    assert culprits([*bare, *bare, bare[0]], [*bare, *bare, bare[1]]) == (1,)


def test_logs_of_different_length_still_decide() -> None:
    """One rank retains fewer entries; the missing ones are no difference."""
    ours, theirs = ran([*STEP * 5, GATHER]), ran([*STEP * 5, REDUCE], keep=10)
    assert find_departed_rank(0, ours, 1, theirs, world_size=2) == 1
    assert find_departed_rank(1, theirs, 0, ours, world_size=2) == 1


def test_a_gap_in_one_ranks_records_is_no_difference() -> None:
    """Old log entries lack the collectives that C++ issued."""
    whole = ran([*STEP * 3, GATHER])
    holed = tuple(r for i, r in enumerate(ran([*STEP * 3, REDUCE])) if i not in (1, 2))
    assert find_departed_rank(0, whole, 1, holed, world_size=2) == 1


def test_branches_on_the_rank_are_no_difference() -> None:
    """In every step, rank 0 broadcasts from one line and the others from another; the fault comes later."""

    def step(line: int) -> list[Call]:
        return [("0", "broadcast", line, 2), *STEP]

    assert culprits([*step(10) * 3, ("0", "broadcast", 10, 2), GATHER],
                    [*step(20) * 3, ("0", "broadcast", 20, 2), REDUCE]) == (1,)  # fmt: skip


def test_a_skipped_call_of_several_at_one_line_is_found_by_other_groups() -> None:
    """Every second step saves; what follows the skipped call is usual in both kinds of steps."""
    again, end = REDUCE, ("0", "all_gather", 97, 3)
    plain, saving = [GATHER, again, VOTE, again, end], [GATHER, again, again, VOTE, again, again, end]
    past = [*plain, *saving, *plain, *saving, *plain]
    assert culprits([*past, *saving[:-1]], [*past, GATHER, again, VOTE, again, again, end]) == (1,)
    assert culprits([*past, GATHER, again, VOTE, again, again, end], [*past, *saving[:-1]]) == (0,)


def test_ranks_outside_a_group_do_not_vote_on_it() -> None:
    """Rank 1 skipped its pair's collective; two ranks of another pair do not form a majority with it."""
    pair: Call = ("pair", "all_reduce", 50, 2)
    step = [pair, REDUCE]
    members = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    programs = [[*step, *step, pair], [*step, *step, REDUCE], [*step, *step, *step], [*step, *step, *step]]
    records = {
        rank: tuple(
            Collective(
                group=r.group, sequence=r.sequence, operation=r.operation, sizes=r.sizes, dtypes=r.dtypes,
                progress=r.progress, location=r.location, members=members[rank] if r.group == "pair" else (),
            )
            for r in ran(program)
        )
        for rank, program in enumerate(programs)
    }  # fmt: skip
    stands = {rank: records[rank][-1] for rank in records}
    assert find_culprits(stands, records, world_size=4) == (1,)


def at(line: int) -> Call:
    """An all-reduce of a source line."""
    return ("0", "all_reduce", line, 7)


def test_a_group_that_only_one_of_two_ranks_has_used_belongs_to_both() -> None:
    """With two ranks there is no other group of several members."""
    assert culprits([*STEP, *STEP, ("pair", "all_reduce", 50, 2)], [*STEP, *STEP, GATHER]) == (0,)


def test_a_rank_that_is_ahead_is_in_another_place() -> None:
    """It waits in the same operation, one call later."""
    assert culprits([*STEP, GATHER, GATHER], [*STEP, GATHER], [*STEP, GATHER]) == (0,)


def test_a_skipped_call_counts_and_not_what_the_other_rank_does_later_for_the_first_time() -> None:
    """Rank 1 leaves out line 6. Rank 0 does not, and then issues a barrier that no step has had."""
    step = [at(1), at(2), at(3), at(4), at(5), at(2), at(6), at(3)]
    right = [*step * 4, ("0", "barrier", 70, 0)]
    wrong = [*step * 3, *step[:6], at(3), at(4), at(5)]
    assert culprits(right, wrong) == (1,)
    assert culprits(wrong, right) == (0,)


def test_the_call_just_before_is_part_of_the_context() -> None:
    """Line 6 follows four calls that are made now too, but not the last one."""
    past = [*map(at, (1, 2, 3, 4, 5, 6, 7, 4, 8)), GATHER, *map(at, (1, 2, 3, 4, 8))]
    assert culprits([*past, GATHER], [*past, at(6)]) == (1,)


def test_the_start_of_the_records_ends_a_context() -> None:
    """Lines 1 and 2 were followed by either call, once as the first calls of all: no rank is named."""
    past = [at(1), at(2), GATHER, at(3), at(1), at(2), at(6), at(1), at(2)]
    assert culprits([*past, GATHER], [*past, at(6)]) == ()


def test_the_size_of_another_call_in_the_same_context_says_nothing() -> None:
    """Once, another line followed the context."""
    past = [*[at(1), at(2), GATHER] * 3, at(1), at(2), at(3), at(1), at(2)]
    assert culprits([*past, GATHER], [*past, ("0", "all_gather", 88, 4)]) == (1,)


def test_a_backward_pass_is_an_all_reduce_without_a_line() -> None:
    """One entry stands for the reductions of a backward pass; a broadcast is something else."""
    gather, reduce, backward = (("0", name, None, 3) for name in ("all_gather", "all_reduce", "backward"))
    barrier, broadcast = ("0", "barrier", None, 3), ("0", "broadcast", None, 3)
    past = [gather, reduce, barrier, gather, backward]
    assert culprits([*past, barrier], [*past, gather]) == (1,)
    past = [gather, broadcast, barrier, gather, reduce]
    assert culprits([*past, barrier], [*past, gather]) == ()
