"""Verdicts on deadlocks, stalls and slow stops: complete, and without unproved claims."""

from __future__ import annotations

import math
import signal
import sysconfig
from dataclasses import replace
from typing import Any

import pytest
from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.diagnosis import hangs, rewards
from grpo_run.watchdog.evidence.stacks import Frame, Stack
from grpo_run.watchdog.observation import OpenPhase, Phase, Slot
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.verdict import Location
from grpo_run.watchdog.waits.sentences import ANOTHER_THREAD

HERE = Location(file="/home/user/train.py", line=88, function="main")
THERE = Location(file="/home/user/train.py", line=12, function="reward")

SLOTS: dict[int, Slot | None] = {
    0: make_slot(0),
    1: make_slot(1, step=6, phases=(OpenPhase(phase=Phase.reward, since_seconds=990.0),)),
    2: None,
}
"""Three ranks, one a step behind, one that cannot be read."""


def stack(line: int, *, main: bool = True) -> Stack:
    """A thread in the user's code."""
    return Stack("0x1", (Frame("/home/user/train.py", line, "reward"),), main)


def deadlock(**changes: Any) -> Deadlock:
    """Rank 1 is wrong; rank 0 waits; both stand at a line, and rank 2's is not known."""
    record = Collective(
        group="0",
        sequence=5,
        operation="all_reduce",
        sizes=(),
        dtypes=(),
        progress=CollectiveProgress.waiting,
    )
    fields: dict[str, Any] = {
        "cause": Cause.collective_mismatch, "culprits": (1,), "waiters": (0,),
        "at": {0: record, 1: record, 2: None}, "locations": {0: HERE, 1: THERE},
        "mismatch": "all_reduce against all_gather", "sentence": "Deadlocked.",
    }  # fmt: skip
    return Deadlock(**(fields | changes))


def stall(**changes: Any) -> Stall:
    """Rank 1 hangs in its reward and rank 0 waits for it."""
    fields: dict[str, Any] = {
        "cause": Cause.reward_stall, "culprits": (1,), "waiters": (0,), "phase": Phase.reward,
        "deadline_seconds": 8.0, "waited_seconds": 9.0, "sentence": "Rank 1 has been in reward for 9.0 s.",
    }  # fmt: skip
    return Stall(**(fields | changes))


def test_a_deadlock_gives_a_proved_verdict() -> None:
    """It is deterministic: the same branch would be taken again."""
    verdict = hangs.diagnose_deadlock(deadlock(), SLOTS, {})
    assert (verdict.confidence, verdict.deterministic) == ("proved", True)
    assert (verdict.cause, verdict.culprits, verdict.waiters) == (Cause.collective_mismatch, (1,), (0,))
    assert (verdict.sentence, verdict.mismatch) == ("Deadlocked.", "all_reduce against all_gather")
    assert (verdict.location, verdict.locations) == (THERE, {0: HERE, 1: THERE})
    assert verdict.phase == "reward"


def test_a_missed_deadline_is_no_proof() -> None:
    """The next attempt may succeed."""
    verdict = hangs.diagnose_stall(stall(), SLOTS, {1: (stack(12),)})
    assert (verdict.confidence, verdict.deterministic) == ("deadline", False)
    assert (verdict.cause, verdict.culprits, verdict.waiters) == (Cause.reward_stall, (1,), (0,))
    assert verdict.location == THERE
    assert verdict.sentence == "Rank 1 has been in reward for 9.0 s, at train.py:12 in reward."
    assert verdict.phase == "reward"


@pytest.mark.parametrize("uninterruptible", [False, True])
def test_a_rank_that_cannot_be_killed_stays_marked(uninterruptible: bool) -> None:
    """The policy depends on it."""
    verdict = hangs.diagnose_stall(stall(uninterruptible=uninterruptible), SLOTS, {})
    assert verdict.uninterruptible is uninterruptible


def test_a_proved_wait_names_what_is_waited_for_and_where() -> None:
    """The calls of the standard library tell a queue from a lock; another thread's line may be the cause."""
    proved = stall(sentence=f"Rank 1 waits for {ANOTHER_THREAD}.", confidence="proved", deadline_seconds=0.0)
    waiting = Frame(f"{sysconfig.get_path('stdlib')}/queue.py", 171, "get")
    main = Stack("MainThread", (waiting, Frame("/home/user/train.py", 88, "reward")), main=True)
    verdict = hangs.diagnose_stall(proved, SLOTS, {1: [main]})
    assert verdict.confidence == "proved"
    assert verdict.sentence == (
        "Rank 1 waits for a queue that no running thread can feed, at train.py:88 in reward."
    )
    beside = hangs.diagnose_stall(proved, SLOTS, {1: [stack(12, main=False), main]})
    assert beside.sentence.endswith(
        "at train.py:88 in reward; another of its threads is at train.py:12 in reward."
    )
    assert beside.location == verdict.location
    unknown = hangs.diagnose_stall(proved, SLOTS, {})
    assert unknown.sentence == proved.sentence


def test_a_stall_without_a_line_keeps_its_sentence() -> None:
    """Nothing is added."""
    verdict = hangs.diagnose_stall(stall(), SLOTS, {})
    assert verdict.location is None
    assert verdict.sentence == stall().sentence


@pytest.mark.parametrize("culprits", [(), (0, 1)])
def test_several_culprits_have_no_single_location(culprits: tuple[int, ...]) -> None:
    """Each culprit's line is in `locations`."""
    stacks = {0: (stack(88),), 1: (stack(12),)}
    for verdict in (
        hangs.diagnose_deadlock(deadlock(culprits=culprits), SLOTS, stacks),
        hangs.diagnose_stall(stall(culprits=culprits, waiters=(0, 1)), SLOTS, stacks),
    ):
        assert verdict.culprit is None
        assert verdict.location is None
        assert set(verdict.locations) == {0, 1}


@pytest.mark.parametrize(
    ("threads", "ending", "place"),
    [
        ([stack(12, main=False)], ", at train.py:12 in reward.", THERE),
        (
            [stack(12, main=False), stack(88)],
            ", at train.py:88 in reward; another of its threads is at train.py:12 in reward.",
            replace(HERE, function="reward"),
        ),
    ],
)
def test_the_thread_that_may_hold_the_interpreter_is_named(
    threads: list[Stack], ending: str, place: Location
) -> None:
    """Beside the main thread, or alone if that has left the user's code."""
    frozen = stall(cause=Cause.interpreter_stuck, sentence="Rank 1's interpreter has not run for 20 s.")
    verdict = hangs.diagnose_stall(frozen, {1: make_slot(1)}, {1: threads})
    assert verdict.sentence == f"Rank 1's interpreter has not run for 20 s{ending}"
    assert (verdict.location, verdict.locations[1]) == (place, place)


def test_a_thread_that_runs_after_the_last_line_is_named() -> None:
    """The main thread has no line any more. While it has one, a healthy thread beside it is no news."""
    quiet = stall(cause=Cause.no_progress, sentence="Rank 1 has been in idle for 60 s.")
    left = hangs.diagnose_stall(quiet, {1: make_slot(1)}, {1: [stack(12, main=False)]})
    assert left.sentence == "Rank 1 has been in idle for 60 s, at train.py:12 in reward."
    both = hangs.diagnose_stall(quiet, {1: make_slot(1)}, {1: [stack(12, main=False), stack(88)]})
    assert both.sentence == "Rank 1 has been in idle for 60 s, at train.py:88 in reward."


def test_a_rank_that_waits_for_others_in_a_store_is_cleared_by_its_stack() -> None:
    """While groups are created no record shows who waits. If every rank is inside torch.distributed, none is
    cleared.
    """
    in_store = Stack(
        "0x1", (Frame("/venv/torch/distributed/rendezvous.py", 200, "_rendezvous"), *stack(88).frames), True
    )
    alone = stall(culprits=(1,), waiters=(0,), sentence="Rank 1 has been in startup for 60.4 s.")
    both = stall(
        culprits=(0, 1), waiters=(), sentence="Rank 0 …; rank 1 missed its deadline too.", alone={1: alone}
    )
    verdict = hangs.diagnose_stall(both, SLOTS, {0: (in_store,), 1: (stack(12),)})
    assert (verdict.culprits, verdict.waiters) == ((1,), (0,))
    assert verdict.sentence == "Rank 1 has been in startup for 60.4 s, at train.py:12 in reward."
    both = replace(both, alone={0: alone, 1: alone})
    for stacks in ({0: (in_store,), 1: (in_store,)}, {0: (stack(88),), 1: (stack(12),)}):
        assert hangs.diagnose_stall(both, SLOTS, stacks).culprits == (0, 1)


def test_the_line_of_a_record_has_priority_over_the_stack() -> None:
    """The stack supplies lines that the records lack."""
    stacks = {0: (stack(1),), 2: (stack(3),)}
    verdict = hangs.diagnose_deadlock(deadlock(), SLOTS, stacks)
    assert {rank: place.line for rank, place in verdict.locations.items()} == {0: 88, 1: 12, 2: 3}


def test_the_full_path_comes_from_the_stack() -> None:
    """A log entry keeps only the end of a path; a stack with another line or file does not complete it."""
    ends = {0: replace(HERE, file="user/train.py"), 1: replace(THERE, file="er/train.py", function="rew")}
    stacks = {0: (stack(12),), 1: (stack(12),)}
    verdict = hangs.diagnose_deadlock(deadlock(locations=ends), SLOTS, stacks)
    assert verdict.location == THERE
    assert verdict.locations == {0: ends[0], 1: THERE}
    other = replace(THERE, file="user/other.py")
    assert hangs.diagnose_deadlock(deadlock(locations={1: other}), SLOTS, stacks).location == other


def test_the_line_of_a_rank_is_its_main_threads() -> None:
    """The stack of a data loader's thread does not show where the rank waits."""
    stacks = {1: (stack(40, main=False), stack(12)), 0: (stack(40, main=False),)}
    assert hangs.stack_locations(stacks) == {1: replace(THERE, line=12)}


def test_the_same_failure_has_the_same_signature() -> None:
    """Line and step identify it; the waiting ranks do not."""
    first = hangs.diagnose_deadlock(deadlock(), SLOTS, {}).signature
    assert hangs.diagnose_deadlock(deadlock(waiters=(0, 2)), SLOTS, {}).signature == first
    assert hangs.diagnose_deadlock(deadlock(locations={1: HERE}), SLOTS, {}).signature != first
    later = {0: make_slot(0, step=8), 1: make_slot(1), 2: None}
    assert hangs.diagnose_deadlock(deadlock(), later, {}).signature != first
    assert hangs.diagnose_stall(stall(), SLOTS, {}).signature != first


def test_all_kinds_of_verdicts_have_the_same_step() -> None:
    """An exit, a deadlock, a stall and a slow stop at the same moment."""
    steps = {
        hangs.diagnose_deadlock(deadlock(), SLOTS, {}).step,
        hangs.diagnose_stall(stall(), SLOTS, {}).step,
        hangs.diagnose_slow_stop(30.0, SLOTS, {}).step,
        diagnose(make_exit(1), slots=SLOTS).step,
    }
    assert len(steps) == 1


def test_without_readable_slots_the_step_is_0() -> None:
    """The phase is unknown."""
    verdict = hangs.diagnose_stall(stall(), dict.fromkeys(SLOTS), {})
    assert verdict.step == 0
    assert hangs.diagnose_deadlock(deadlock(), dict.fromkeys(SLOTS), {}).phase is None


@pytest.mark.parametrize("cause", [Cause.collective_mismatch, Cause.rank_exited_early])
def test_advice_belongs_to_the_cause(cause: Cause) -> None:
    """A cause without advice gives none."""
    assert hangs.diagnose_deadlock(deadlock(cause=cause), SLOTS, {}).advice == (hangs.ADVICE[cause],)
    assert hangs.diagnose_stall(stall(cause=Cause.no_progress), SLOTS, {}).advice == ()


def test_a_slow_stop_has_no_culprit() -> None:
    """It is unknown which rank was slow; every rank's line is kept."""
    verdict = hangs.diagnose_slow_stop(30.0, SLOTS, {0: (stack(88),), 1: (stack(12),)})
    assert (verdict.culprits, verdict.cause, verdict.deterministic) == ((), Cause.unknown, False)
    assert verdict.waiters == (0, 1, 2)
    assert set(verdict.locations) == {0, 1}
    assert "30 s" in verdict.sentence


def test_a_verdict_on_exits_gets_the_lines_of_waiting_ranks() -> None:
    """The culprit's own line and all other fields stay."""
    verdict = diagnose(make_exit(1, error=make_error()), slots=SLOTS)
    placed = hangs.add_locations(verdict, {0: (stack(88),), 1: (stack(99),)})
    assert {rank: place.line for rank, place in placed.locations.items()} == {0: 88, 1: 12}
    assert replace(placed, locations={}) == verdict


@pytest.mark.parametrize("alone", [False, True])
def test_steps_of_a_loop_of_the_script_s_own_are_not_taken_for_counted_ones(alone: bool) -> None:
    """They are not counted, so a deadlock at the same line may be another one, and no step is named."""
    slots: dict[int, Slot | None] = {
        0: make_slot(0),
        1: make_slot(1, no_trainer_after=2 if alone else 0),
        2: None,
    }
    proved = stall(confidence="proved", lasts_seconds=math.inf)
    verdicts = (
        hangs.diagnose_deadlock(deadlock(), slots, {}),
        hangs.diagnose_stall(proved, slots, {}),
        hangs.diagnose_slow_stop(30.0, slots, {}),
    )
    assert [verdict.counted for verdict in verdicts] == [not alone] * 3
    assert [verdict.deterministic for verdict in verdicts] == [not alone, not alone, False]
    assert ("step" in verdicts[2].sentence) is not alone


def test_ranks_that_wait_at_one_line_are_placed_there() -> None:
    """Two incidents of several ranks are the same one only if their lines are the same."""
    both = stall(culprits=(0, 1), waiters=(), sentence="They wait.", confidence="proved")
    verdict = hangs.diagnose_stall(both, SLOTS, {0: (stack(12),), 1: (stack(12),)})
    assert (verdict.location, verdict.sentence) == (THERE, "They wait, at train.py:12 in reward.")
    assert ":12:" in verdict.signature
    assert hangs.diagnose_stall(both, SLOTS, {0: (stack(12),), 1: (stack(88),)}).location is None
    left = Stack("0x1", (), True)  # the main threads have run their last line
    both_left = {rank: (left, stack(12, main=False)) for rank in (0, 1)}
    assert hangs.diagnose_stall(both, SLOTS, both_left).locations == {0: THERE, 1: THERE}


def test_ranks_in_different_waits_have_no_common_name_for_them() -> None:
    """What one of two culprits waits for is not said of both."""
    library = sysconfig.get_path("stdlib")
    queue = Stack("0x1", (Frame(f"{library}/queue.py", 171, "get"), *stack(88).frames), True)
    sentence = f"Ranks 0 and 1 wait for {ANOTHER_THREAD}."
    both = stall(culprits=(0, 1), waiters=(), sentence=sentence, confidence="proved")
    assert "a queue" in hangs.diagnose_stall(both, SLOTS, {0: (queue,), 1: (queue,)}).sentence
    assert hangs.diagnose_stall(both, SLOTS, {0: (queue,), 1: (stack(12),)}).sentence == sentence


@pytest.mark.parametrize("cause", sorted(Cause))
def test_a_healthy_thread_beside_a_missed_deadline_is_not_named(cause: Cause) -> None:
    """It may hold the interpreter, and otherwise nothing."""
    verdict = hangs.diagnose_stall(stall(cause=cause), SLOTS, {1: (stack(88, main=False), stack(12))})
    assert ("another of its threads" in verdict.sentence) is (cause is Cause.interpreter_stuck)


@pytest.mark.parametrize("phase", [*Phase, None])
def test_a_reward_function_has_failed_in_the_reward_phase_only(phase: Phase | None) -> None:
    """Its frames are on the stack also while a callback or a data loader that it has called runs."""
    called = (Frame("/home/user/train.py", 12, "reward"), Frame(rewards.CALLER_FILE, 1, "call_in_rank"))
    verdict = hangs.diagnose_stall(stall(phase=phase), SLOTS, {1: (Stack("0x1", called, True),)})
    assert (verdict.failed_reward is not None) is (phase is Phase.reward)


def test_a_culprit_without_a_line_gets_none_from_its_stack() -> None:
    """The stacks show where ranks wait; one that has exited has none."""
    verdict = diagnose(make_exit(1, signal=signal.SIGKILL), slots=SLOTS)
    assert verdict.culprit == 1
    assert verdict.location is None
    assert set(hangs.add_locations(verdict, {0: (stack(88),), 1: (stack(99),)}).locations) == {0}


def test_a_stack_at_another_line_of_the_same_file_does_not_complete_a_record() -> None:
    """The rank has gone on since it issued the collective."""
    short = replace(THERE, file="user/train.py")
    for line in (11, 13):
        verdict = hangs.diagnose_deadlock(deadlock(locations={1: short}), SLOTS, {1: (stack(line),)})
        assert verdict.location == short


PEER_GONE = "Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("why", "exits", "collectives"),
    [
        ("Gloo aborts one side and closes the other's connections", ["abort", "victim"], True),
        ("one left, the others noticed", ["left", "victim"], True),
        ("all are victims", ["victim", "victim"], True),
        ("somebody was killed", ["kill", "victim"], False),
        ("somebody raised", ["own", "victim"], False),
        ("an abort beside an exception", ["abort", "own"], False),
        ("code 1 and no word", ["silent"], False),
    ],
)
def test_an_exit_with_its_own_cause_is_not_attributed_to_collectives(
    why: str, exits: list[str], collectives: bool
) -> None:
    """Only aborts, lost connections and exits with code 0 may be."""
    kinds = {
        "abort": lambda rank: make_exit(rank, signal=signal.SIGABRT),
        "kill": lambda rank: make_exit(rank, signal=signal.SIGKILL),
        "victim": lambda rank: make_exit(rank, error=make_error(type="RuntimeError", message=PEER_GONE)),
        "own": lambda rank: make_exit(rank, error=make_error()),
        "left": lambda rank: make_exit(rank, exit_code=0, completed=True),
        "silent": make_exit,
    }
    ended = [kinds[kind](rank) for rank, kind in enumerate(exits)]
    assert hangs.caused_by_collectives(ended) is collectives, why
