"""Stalls that collectives cannot prove: which ranks are blamed, and when none is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.detection import find_stall
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.nested_phases import NestedPhaseTime
from grpo_run.watchdog.stalls.stall import ProcessFacts, Stall
from grpo_run.watchdog.stalls.stragglers import find_stragglers

MakeSlot = Callable[..., Slot]
NOW = 100_000.0
SHORT = Durations.of([0.05] * 21)
EVERY_PHASE = frozenset(Phase)


def nest(*phases: tuple[Phase, float]) -> tuple[OpenPhase, ...]:
    """Open phases, outermost first, each with how many seconds ago it began."""
    return tuple(OpenPhase(phase=phase, since_seconds=NOW - ago) for phase, ago in phases)


def look(slots: dict[int, Slot | None], **changes: Any) -> Stall | None:
    """Detect at NOW. 20 short occurrences of every phase give deadlines of 8 s; no rank waits."""
    given: dict[str, Any] = {
        "now": NOW, "learned": dict.fromkeys(Phase, SHORT), "completed": dict.fromkeys(slots, EVERY_PHASE),
        "settings": DeadlineSettings(floor_seconds=8.0), "processes": dict.fromkeys(slots, facts()), "progress": {},
        "waiting": dict.fromkeys(slots, False),
    }  # fmt: skip
    return find_stall(slots, **(given | changes))


def facts(state: str = "S", **changes: Any) -> ProcessFacts:
    """A process that sleeps, as one does that waits for anything."""
    return ProcessFacts(
        **({"state": state, "cpu_seconds": 10.0, "io_bytes": 1000, "heartbeat_age_seconds": 0.2} | changes)
    )


def test_the_sentence_names_rank_phase_time_and_what_was_learned(make_slot: MakeSlot) -> None:
    """One line, for the title of the report."""
    settings = DeadlineSettings(floor_seconds=6.0)
    slots = {
        0: make_slot(0, phases=nest((Phase.vote, 7.0))),
        1: make_slot(1, phases=nest((Phase.reward, 7.2))),
    }
    stall = look(slots, settings=settings)
    assert stall is not None
    assert stall.sentence == (
        "Rank 1 has been in reward for 7.2 s without progress (deadline 6.0 s, learned from 20 occurrences)."
    )
    assert (stall.culprits, stall.waiters, stall.confidence) == ((1,), (0,), "deadline")
    assert (stall.deadline_seconds, stall.waited_seconds) == (6.0, pytest.approx(7.2))


def test_a_fresh_inner_phase_does_not_hide_an_overdue_outer_one(make_slot: MakeSlot) -> None:
    """1000 s in a phase with a deadline of 100 s, with a reward that has just begun inside it."""
    learned = {Phase.score: Durations.of([0.1] + [20.0] * 50), Phase.reward: SHORT}
    slots = {0: make_slot(0, phases=nest((Phase.score, 1000.0), (Phase.reward, 0.1)))}
    settings = DeadlineSettings(ceiling_seconds=100.0)
    stall = look(slots, learned=learned, settings=settings)
    assert stall is not None
    assert (stall.phase, stall.deadline_seconds, stall.cause) == (Phase.score, 100.0, Cause.no_progress)


def test_an_outer_phase_pauses_during_an_inner_one(make_slot: MakeSlot) -> None:
    """The first checkpoint of a run takes a minute inside a `data` phase of milliseconds."""
    slots = {0: make_slot(0, phases=nest((Phase.data, 60.2), (Phase.checkpoint, 60.0)))}
    assert look(slots, learned={Phase.data: SHORT}, completed={0: {Phase.data}}) is None


def test_the_time_of_a_finished_inner_phase_is_subtracted(make_slot: MakeSlot) -> None:
    """After that checkpoint, `data` alone is open and a minute old."""
    data, saving = OpenPhase(phase=Phase.data, since_seconds=900.0), OpenPhase(
        phase=Phase.checkpoint, since_seconds=900.1
    )  # fmt: skip
    inner = NestedPhaseTime().after({0: make_slot(0, phases=(data, saving))}, 950.0)
    slots: dict[int, Slot | None] = {0: make_slot(0, phases=(data,))}
    inner = inner.after(slots, 960.0).after({0: None}, 961.0).after(slots, 962.0)
    known = {Phase.data: SHORT, Phase.checkpoint: Durations.of([59.9])}
    assert look(slots, now=962.0, learned=known) is not None  # what the time is taken off from
    assert look(slots, now=962.0, learned=known, nested=inner) is None
    stall = look(slots, now=969.0, learned=known, nested=inner)
    assert stall is not None
    assert (stall.cause, stall.waited_seconds) == (Cause.data_stall, pytest.approx(9.1))


def test_endless_inner_phases_do_not_hide_an_overdue_outer_one(make_slot: MakeSlot) -> None:
    """For a loop of rewards, at most one deadline per kind of phase is subtracted."""
    score, inner = OpenPhase(phase=Phase.score, since_seconds=0.0), NestedPhaseTime()
    now = 0.0
    while now < 200.0:
        now += 1.0
        reward = OpenPhase(phase=Phase.reward, since_seconds=now)
        slots: dict[int, Slot | None] = {0: make_slot(0, phases=(score, reward))}
        inner = inner.after(slots, now + 0.5)
    assert inner.spent[0, 0, score][Phase.reward] == pytest.approx(199.0)
    stall = look(slots, now=now + 0.5, nested=inner)
    assert stall is not None
    assert (stall.phase, len(inner.spent)) == (Phase.score, 1)


def test_of_two_overdue_phases_the_innermost_names_the_cause(make_slot: MakeSlot) -> None:
    """A hung reward inside `score`, which is overdue too."""
    stall = look({0: make_slot(0, phases=nest((Phase.score, 60.0), (Phase.reward, 30.0)))})
    assert stall is not None
    assert (stall.phase, stall.cause) == (Phase.reward, Cause.reward_stall)


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        (Phase.generate, Cause.generation_stall), (Phase.reward, Cause.reward_stall),
        (Phase.data, Cause.data_stall), (Phase.checkpoint, Cause.checkpoint_stall),
        (Phase.startup, Cause.no_progress), (Phase.forward_backward, Cause.no_progress),
    ],
)  # fmt: skip
def test_the_phase_determines_the_cause(make_slot: MakeSlot, phase: Phase, cause: Cause) -> None:
    """Nothing else is known about a hang without collectives."""
    stall = look({0: make_slot(0, phases=nest((phase, 20.0)))})
    assert stall is not None
    assert stall.cause is cause


def test_progress_restarts_the_clocks_of_all_open_phases(make_slot: MakeSlot) -> None:
    """An hour of generation whose last token came a second ago is slow, not hung."""
    slots = {0: make_slot(0, phases=nest((Phase.score, 9000.0), (Phase.generate, 8999.0)))}
    assert look(slots, progress={0: NOW - 1.0}) is None
    assert look(slots, progress={0: NOW - 9.0}) is not None


def test_progress_before_a_phase_does_not_count_for_it(make_slot: MakeSlot) -> None:
    """It does not make the phase older either."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 7.0)))}
    assert look(slots, progress={0: NOW - 50.0}) is None
    assert look(slots, now=NOW + 2.0, progress={0: NOW - 50.0}) is not None


def test_a_rank_that_waits_for_a_working_rank_is_not_blamed(make_slot: MakeSlot) -> None:
    """Rank 0 has waited beyond its deadline; rank 1 still generates, within its own."""
    slots = {
        0: make_slot(0, phases=nest((Phase.optimizer, 60.0))),
        1: make_slot(1, phases=nest((Phase.generate, 61.0))),
    }
    learned = {Phase.optimizer: SHORT, Phase.generate: Durations.of([60.0] * 30)}
    assert look(slots, learned=learned, waiting={0: True, 1: False}) is None


def test_a_rank_within_its_deadline_protects_ranks_that_may_wait(make_slot: MakeSlot) -> None:
    """Rank 0 may be blocked in a collective of C++; it is blamed once rank 1 is overdue too."""
    slots: dict[int, Slot | None] = {
        0: make_slot(0, phases=nest((Phase.optimizer, 60.0))),
        1: make_slot(1, phases=nest((Phase.generate, 61.0))),
    }
    learned = {Phase.optimizer: SHORT, Phase.generate: Durations.of([60.0] * 30)}
    assert look(slots, learned=learned, waiting={}) is None
    assert look(slots | {1: None}, learned=learned, waiting={}) is None
    assert look({0: slots[0]}, learned=learned, waiting={}, whole_world=False) is None
    stall = look(slots, waiting={})
    assert stall is not None
    assert stall.culprits == (1, 0)
    assert stall.sentence.endswith("; rank 0 missed its deadline too.")
    assert {rank: one.culprits for rank, one in stall.alone.items()} == {0: (0,), 1: (1,)}
    assert "too" not in stall.alone[0].sentence


def test_the_longest_silent_rank_is_named_first(make_slot: MakeSlot) -> None:
    """The later one may only wait for it."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, ago))) for rank, ago in ((0, 20.0), (1, 40.0))}
    stall = look(slots)
    assert stall is not None
    assert stall.culprits == (1, 0)


def test_an_unreadable_rank_is_neither_culprit_nor_reason(make_slot: MakeSlot) -> None:
    """All observed ranks wait beyond their deadlines, possibly for the unreadable one."""
    slots = {0: make_slot(0, phases=nest((Phase.vote, 500.0))), 1: None}
    assert look(slots) is None
    assert look({0: None, 1: None}) is None
    assert look({0: None, 1: make_slot(1, state=RankState.absent, phases=nest((Phase.data, 900.0)))}) is None


def test_a_zombie_is_not_judged(make_slot: MakeSlot) -> None:
    """Its slot shows its last phase; the agent is about to read its exit code."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 60.0)))}
    assert look(slots, processes={0: facts("Z")}) is None


def test_no_rank_is_blamed_if_all_wait(make_slot: MakeSlot) -> None:
    """The sentence says so."""
    slots = {rank: make_slot(rank, phases=nest((Phase.optimizer, 20.0 + rank))) for rank in range(2)}
    stall = look(slots, waiting={0: True, 1: True})
    assert stall is not None
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.no_progress, (), (0, 1))
    assert "cannot tell which" in stall.sentence
    assert stall.waited_seconds == pytest.approx(20.0)


def test_all_ranks_waiting_is_no_hang_before_the_last_deadline(make_slot: MakeSlot) -> None:
    """The collective may be about to complete; ranks on other nodes may still work."""
    slots = {rank: make_slot(rank, phases=nest((Phase.vote, ago))) for rank, ago in ((0, 60.0), (1, 0.1))}
    assert look(slots) is None
    long_ago = {rank: make_slot(rank, phases=nest((Phase.vote, 60.0))) for rank in range(2)}
    assert look(long_ago, whole_world=False) is None


def test_a_stopped_rank_does_not_merely_wait(make_slot: MakeSlot) -> None:
    """SIGSTOP inside a collective: its slot says that it waits."""
    slots = {rank: make_slot(rank, phases=nest((Phase.vote, 20.0))) for rank in range(3)}
    stall = look(slots, processes={0: facts(), 1: facts("T", heartbeat_age_seconds=float("nan")), 2: facts()})
    assert stall is not None
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.interpreter_stuck, (1,), (0, 2))
    assert stall.sentence.startswith("Rank 1 is stopped (SIGSTOP), in vote for 20.0 s")


def test_of_waiting_ranks_the_one_with_a_stuck_interpreter_is_blamed(make_slot: MakeSlot) -> None:
    """Nothing else distinguishes it."""
    slots = {rank: make_slot(rank, phases=nest((Phase.vote, 20.0))) for rank in range(2)}
    stall = look(slots, processes={0: facts(), 1: facts("R", heartbeat_age_seconds=19.0)})
    assert stall is not None
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.interpreter_stuck, (1,), (0,))


@pytest.mark.parametrize(
    ("age", "cause"),
    [(19.0, Cause.interpreter_stuck), (1.0, Cause.reward_stall), (float("nan"), Cause.reward_stall)],
)
def test_a_late_heartbeat_overrides_the_phase(make_slot: MakeSlot, age: float, cause: Cause) -> None:
    """A regular expression that holds the GIL is no slow reward server; an unknown heartbeat says nothing."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 20.0)))}
    stall = look(slots, processes={0: facts("R", heartbeat_age_seconds=age)})
    assert stall is not None
    assert stall.cause is cause


def test_a_late_heartbeat_alone_is_no_hang(make_slot: MakeSlot) -> None:
    """A long call into C is no hang before the phase is overdue."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 5.0)))}
    assert look(slots, processes={0: facts("T", heartbeat_age_seconds=5.0)}) is None


def test_a_culprit_that_cannot_be_killed_is_marked(make_slot: MakeSlot) -> None:
    """A restart would fail while it holds the accelerator."""
    slots = {0: make_slot(0, phases=nest((Phase.checkpoint, 20.0)))}
    stall = look(slots, processes={0: facts("D")})
    assert stall is not None
    assert stall.uninterruptible
    assert "rank 0 is in uninterruptible sleep" in stall.sentence
    assert look(slots, processes={}) is not None  # not seen: a hang all the same


def test_a_first_occurrence_in_a_new_attempt_is_not_held_to_later_ones(make_slot: MakeSlot) -> None:
    """After a restart the first step compiles again."""
    slots = {0: make_slot(0, phases=nest((Phase.forward_backward, 50.0)))}
    assert look(slots, completed={0: {Phase.data}}) is None
    assert look(slots, completed={}) is None
    stall = look(slots, now=NOW + 20.0, completed={})
    assert stall is not None
    assert "learned from a first occurrence of 0.1 s" in stall.sentence


def test_a_rank_that_never_starts_training_is_found(make_slot: MakeSlot) -> None:
    """In state `starting`, with or without the phase; after an hour if no start-up was observed."""
    for phases in ((), nest((Phase.startup, 4000.0))):
        slot = make_slot(0, state=RankState.starting, phases=phases, last_progress_seconds=NOW - 4000.0)
        stall = look({0: slot}, learned={}, completed={})
        assert stall is not None
        assert (stall.phase, stall.deadline_seconds) == (Phase.startup, 3600.0)
        assert "nothing learned yet" in stall.sentence
        assert look({0: slot}, now=NOW - 500.0, learned={}, completed={}) is None


def test_between_two_calls_the_deadline_is_the_ceiling(make_slot: MakeSlot) -> None:
    """Short pauses before say nothing about a later one."""
    slot = make_slot(0, state=RankState.between, phases=nest((Phase.idle, 3000.0)))
    assert look({0: slot}) is None
    stall = look({0: slot}, now=NOW + 700.0)
    assert stall is not None
    assert stall.phase is Phase.idle


@pytest.mark.parametrize("state", [RankState.done, RankState.failed])
def test_a_script_that_has_ended_is_not_judged_by_its_phases(make_slot: MakeSlot, state: RankState) -> None:
    """Other ranks can still all wait."""
    ended = make_slot(0, state=state, phases=nest((Phase.idle, 9000.0)))
    assert look({0: ended}) is None
    stall = look({0: ended, 1: make_slot(1, phases=nest((Phase.vote, 20.0)))})
    assert stall is not None
    assert (stall.culprits, stall.waiters) == ((), (1,))


ranks_seen = st.dictionaries(
    st.integers(0, 3),
    st.tuples(
        st.sampled_from(list(Phase)),
        st.floats(0, 500),
        st.booleans(),
        st.booleans(),
        st.sampled_from("RSDTZ"),
    ),
    min_size=1,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture is a pure function
@given(ranks_seen)
def test_only_overdue_ranks_that_do_not_wait_are_ever_blamed(
    make_slot: MakeSlot, seen: dict[int, Any]
) -> None:
    """For any mixture of phases, waits, states and unreadable slots."""
    slots: dict[int, Slot | None] = {
        rank: make_slot(rank, phases=nest((phase, ago))) if readable else None
        for rank, (phase, ago, readable, _, _) in seen.items()
    }
    waits = {rank: waits for rank, (_, _, _, waits, _) in seen.items()}
    stall = look(slots, waiting=waits, processes={rank: facts(one[4]) for rank, one in seen.items()})
    if stall is None:
        return
    assert not set(stall.culprits) & set(stall.waiters)
    for rank in stall.culprits:
        phase, ago, readable, waits_too, state = seen[rank]
        assert readable
        assert ago > 8.0
        assert state != "Z"
        assert state == "T" or not (waits_too or phase is Phase.vote)


def test_a_rank_twice_as_slow_in_its_own_work_is_reported() -> None:
    """The phase that costs most time first."""
    usual = {Phase.generate: Durations.of([1.0] * 30), Phase.reward: Durations.of([0.5] * 30)}
    slow = {Phase.generate: Durations.of([4.0] * 30), Phase.reward: Durations.of([1.0] * 30)}
    found = find_stragglers({0: usual, 1: usual, 2: slow})
    assert [(one.rank, one.phase) for one in found] == [(2, Phase.generate), (2, Phase.reward)]
    assert found[0].ratio == pytest.approx(4.0)


@pytest.mark.parametrize(
    "slow",
    [
        {Phase.generate: Durations.of([4.0] * 20)},  # 19 after the first: too few
        {Phase.generate: Durations.of([1.1] * 30)},  # hardly slower
        {Phase.data: Durations.of([0.04] * 30)},  # ten times, but 36 ms
        {
            Phase.vote: Durations.of([9.0] * 30),
            Phase.forward_backward: Durations.of([9.0] * 30),
        },  # waits included
    ],
)
def test_noise_is_no_straggler(slow: dict[Phase, Durations]) -> None:
    """Neither are ranks in phases in which all wait for the slowest."""
    usual = {
        Phase.generate: Durations.of([1.0] * 30), Phase.data: Durations.of([0.004] * 30),
        Phase.vote: Durations.of([0.001] * 30), Phase.forward_backward: Durations.of([1.0] * 30),
    }  # fmt: skip
    assert find_stragglers({0: usual, 1: usual, 2: slow}) == []


def test_a_single_rank_is_no_straggler() -> None:
    """There is nothing to compare it with."""
    assert find_stragglers({0: {Phase.generate: Durations.of([100.0] * 30)}}) == []


# quiet and frozen ranks

KINDS = st.sampled_from(["quiet", "waits", "works", "unknown", "exited"])


@given(kinds=st.lists(KINDS, min_size=2, max_size=5), seconds=st.floats(0.0, 1e4), connected=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_quiet_rule_ends_nobody_while_a_rank_works_or_is_unknown(
    make_slot: MakeSlot, kinds: list[str], seconds: float, connected: bool
) -> None:
    """It ends exactly the ranks that do nothing, once nobody has worked for as long as the deadline."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, seconds))) for rank in range(len(kinds))}
    stall = look(
        slots,
        learned={},
        completed={},
        settings=DeadlineSettings(ceiling_seconds=1e6, first_seconds=1e6),
        processes={
            rank: None if kind in ("unknown", "exited")
            else facts(quiet_seconds=seconds if kind == "quiet" else 0.0, connected=connected)
            for rank, kind in enumerate(kinds)
        },
        waiting={rank: kind == "waits" for rank, kind in enumerate(kinds)},
        still=dict.fromkeys(slots, seconds),
        exited=[rank for rank, kind in enumerate(kinds) if kind == "exited"],
    )  # fmt: skip
    nobody_works = not {"works", "unknown"} & set(kinds)
    quiet = tuple(rank for rank, kind in enumerate(kinds) if kind == "quiet")
    if nobody_works and quiet and seconds > (300.0 if connected else 60.0):
        assert stall is not None
        assert sorted(stall.culprits) == list(quiet)
    else:
        assert stall is None


@given(
    state=st.sampled_from("RSDTtZ"),
    age=st.floats(0.0, 1e4) | st.just(float("nan")),
    ended=st.floats(0.0, 100.0),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rank_that_is_not_known_to_be_frozen_is_not_ended_as_frozen(
    make_slot: MakeSlot, state: str, age: float, ended: float
) -> None:
    """However old its heartbeat is."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, 10.0))) for rank in (0, 1)}
    unknown = facts(state=state, heartbeat_age_seconds=age)
    learned = {Phase.reward: Durations().ended_after(ended)}
    for told in (unknown, None):
        stall = look(
            slots, settings=DeadlineSettings(), learned=learned, completed={}, processes={0: facts(), 1: told}
        )
        assert stall is None


def test_a_frozen_rank_is_ended_in_any_phase_while_others_work(make_slot: MakeSlot) -> None:
    """Nothing that another rank does lets its interpreter run."""
    for phase in Phase:
        slots = {rank: make_slot(rank, phases=nest((phase, 25.0))) for rank in (0, 1)}
        stall = look(
            slots, settings=DeadlineSettings(), learned={}, completed={},
            processes={0: facts(), 1: facts(heartbeat_age_seconds=21.0, frozen_seconds=21.0)},
        )  # fmt: skip
        assert stall is not None
        assert (stall.culprits, stall.cause, stall.deadline_seconds) == ((1,), Cause.interpreter_stuck, 20.0)


def test_a_thread_that_runs_in_a_waiting_rank_is_blamed_only_if_nobody_works(make_slot: MakeSlot) -> None:
    """Native code may wait for other ranks without releasing the interpreter; they may be at work for it."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, 25.0))) for rank in (0, 1)}
    told = {0: facts(), 1: facts(heartbeat_age_seconds=21.0, frozen_seconds=21.0)}
    common: dict[str, Any] = {
        "settings": DeadlineSettings(),
        "learned": {},
        "completed": {},
        "processes": told,
    }
    assert look(slots, waiting={0: False, 1: True}, **common) is None
    stall = look(slots, waiting={0: True, 1: True}, **common)
    assert stall is not None
    assert stall.culprits == (1,)


def test_next_to_a_rank_that_does_not_wait_one_that_may_wait_is_not_blamed(make_slot: MakeSlot) -> None:
    """Rank 0 is in its backward pass, and its Flight Recorder does not answer."""
    slots = {
        0: make_slot(0, phases=nest((Phase.forward_backward, 90.0))),
        1: make_slot(1, phases=nest((Phase.reward, 90.0))),
    }
    stall = look(
        slots, settings=DeadlineSettings(), learned={}, completed={}, waiting={1: False},
        processes={rank: facts(quiet_seconds=80.0, connected=False) for rank in (0, 1)},
    )  # fmt: skip
    assert stall is not None
    assert stall.culprits == (1,)


def test_the_sentence_names_the_callback(make_slot: MakeSlot) -> None:
    """Its class and event; it has deadlines of its own."""
    here = OpenPhase(phase=Phase.callback, since_seconds=NOW - 61.0, callback="MyCallback.on_step_end")
    slots = {0: make_slot(0, phases=nest((Phase.vote, 61.0))), 1: make_slot(1, phases=(here,))}
    stall = look(
        slots, settings=DeadlineSettings(), learned={"MyCallback.on_step_end": SHORT},
        completed={1: {"MyCallback.on_step_end"}},
    )  # fmt: skip
    assert stall is not None
    assert stall.sentence == (
        "Rank 1 has been in callback MyCallback.on_step_end for 61.0 s without progress"
        " (deadline 60.0 s, learned from 20 occurrences)."
    )
    assert stall.key == "MyCallback.on_step_end"
