"""A step that can have no end is ended; one that moves, or of which too little is known, is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.stalls.step_clock import SLOW_SECONDS, StepClock

POLL = 1.0
SETTINGS = DeadlineSettings()


class Run:
    """Two ranks whose slots a test changes; time passes in polls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = StepClock(SETTINGS, self.now)
        self.fields: dict[str, Any] = {
            "voted_step": 0, "tokens_generated": 0, "rewards_scored": 0, "last_work_seconds": 900.0,
            "step": 0,
        }  # fmt: skip
        self.phases: tuple[OpenPhase, ...] = ()
        self.enters(Phase.forward_backward, Phase.score)

    def enters(self, *phases: Phase) -> None:
        """All open phases from now on, the outermost first."""
        self.phases = tuple(OpenPhase(phase=phase, since_seconds=self.now) for phase in phases)

    def passes(self, seconds: float, act: Callable[[], None] = lambda: None, *, every: float = POLL) -> None:
        """Time passes; `act` is called before each poll."""
        end = self.now + seconds
        while self.now < end:
            self.now += every
            act()
            self.clock.record({rank: self.slot(rank) for rank in (0, 1)}, self.now)

    def stalls(self) -> Stall:
        """The stall that there is."""
        found = self.clock.stall()
        assert found is not None
        return found

    def slot(self, rank: int) -> Slot:
        """The slot of a rank."""
        return make_slot(rank, phases=self.phases, **self.fields)

    def works(self) -> None:
        """The model runs."""
        self.fields["last_work_seconds"] = self.now
        if self.phases[-1].phase is Phase.generate:
            self.fields["generation_passes"] = self.fields.get("generation_passes", 0) + 1

    def commits(self) -> None:
        """The step is done."""
        self.fields["voted_step"] += 1


@pytest.fixture
def run() -> Run:
    """Ranks whose model has run once, as in every step with a model that is not compiled."""
    made = Run()
    made.passes(2.0, made.works)
    return made


def alternates(run: Run) -> Callable[[], None]:
    """Phases begin and end for ever, and nothing is done in them."""

    def act() -> None:
        run.enters(Phase.forward_backward, Phase.reward if int(run.now) % 10 < 7 else Phase.score)

    return act


def test_busy_ranks_that_do_nothing_countable_are_no_progress(run: Run) -> None:
    """After the deadline of a start, with where the time went."""
    run.passes(SETTINGS.startup_seconds - 10, alternates(run))
    assert run.clock.stall() is None
    run.passes(20, alternates(run))
    stall = run.stalls()
    assert stall.cause is Cause.no_progress
    assert stall.culprits == ()
    assert stall.waiters == (0, 1)
    assert "reward 42 min and score 18 min" in stall.sentence


def test_forty_minutes_of_honest_generation_are_reported_once_and_not_ended(run: Run) -> None:
    """A first step that takes long because the model is large, with the end of its generation."""
    run.fields["generation_limit"] = 4096.0
    run.enters(Phase.forward_backward, Phase.score, Phase.generate)
    run.passes(SLOW_SECONDS / 2, run.works)
    assert run.clock.slow_sentence() is None
    run.passes(SLOW_SECONDS, run.works)
    sentence = run.clock.slow_sentence()
    assert sentence is not None
    assert sentence.startswith("step 1 is slow but makes progress: it has taken 15 min")
    assert "at 1 tokens per second and completion, its generation ends within 53 min" in sentence
    run.passes(2 * SETTINGS.startup_seconds, run.works)
    assert run.clock.stall() is None


@pytest.mark.parametrize(
    "phase", [Phase.startup, Phase.data, Phase.checkpoint, Phase.eval, Phase.idle, Phase.callback]
)
def test_phases_whose_work_is_not_counted_have_their_own_deadlines(run: Run, phase: Phase) -> None:
    """An upload, an evaluation or a loader may take hours."""
    run.enters(Phase.forward_backward, phase)
    run.passes(3 * SETTINGS.startup_seconds, every=10.0)
    assert run.clock.stall() is None
    assert run.clock.slow_sentence() is None


def test_the_generation_of_another_engine_is_unknown(run: Run) -> None:
    """vLLM does not run the model's forward hooks."""
    run.passes(5.0)
    run.enters(Phase.forward_backward, Phase.score, Phase.generate)
    run.passes(3 * SETTINGS.startup_seconds, every=10.0)
    assert run.clock.stall() is None
    assert run.clock.slow_sentence() is None


def test_a_compiled_model_is_unknown() -> None:
    """It has no hook, so nothing shows that it runs."""
    run = Run()
    run.passes(3 * SETTINGS.startup_seconds, alternates(run))
    assert run.clock.stall() is None


def test_passes_of_generation_show_that_passes_are_counted() -> None:
    """Steps may be faster than polls, so that no pass is ever seen to come alone."""
    run = Run()
    run.fields["generation_passes"] = 100
    run.passes(SETTINGS.startup_seconds + 10, alternates(run))
    assert run.clock.stall() is not None


def test_a_reward_that_is_scored_now_and_then_moves(run: Run) -> None:
    """A slow judge."""

    def scores() -> None:
        run.enters(Phase.forward_backward, Phase.reward)
        run.fields["rewards_scored"] += int(run.now) % 600 == 0

    run.passes(3 * SETTINGS.startup_seconds, scores)
    assert run.clock.stall() is None


def test_each_step_has_its_own_clock_and_later_ones_a_learned_deadline(run: Run) -> None:
    """Five times the longest step, but as much as a phase may take at least."""
    for _ in range(3):
        run.passes(1000, run.works)
        run.commits()
        run.passes(1.0, run.works)
    assert run.clock.deadline_seconds == pytest.approx(5 * 1001, rel=0.01)
    run.passes(4900, alternates(run))
    assert run.clock.stall() is None
    run.passes(200, alternates(run))
    assert run.clock.stall() is not None
    run.commits()
    run.passes(1.0, run.works)
    assert run.clock.stall() is None


def test_a_pause_of_the_supervisor_counts_for_nothing(run: Run) -> None:
    """What was not observed is unknown."""
    run.passes(SETTINGS.startup_seconds - 100, alternates(run))
    run.now += 10 * SETTINGS.startup_seconds
    run.passes(50, alternates(run))
    assert run.clock.stall() is None


def test_a_rank_that_does_not_train_or_cannot_be_read_stops_the_clock(run: Run) -> None:
    """Before the call, after it, and with an unreadable board."""
    run.passes(SETTINGS.startup_seconds - 100, alternates(run))
    run.fields["state"] = RankState.between
    run.passes(1000, alternates(run))
    assert run.clock.stall() is None
    run.fields["state"] = RankState.training
    run.clock.record({0: run.slot(0), 1: None}, run.now)
    assert run.clock.position is None


def test_one_rank_alone_is_named_in_the_singular() -> None:
    """The whole sentence, with the rank, the times and the deadline."""
    run = Run()

    def record(seconds: int, act: Callable[[], None]) -> None:
        for _ in range(seconds):
            run.now += POLL
            act()
            run.clock.record({3: run.slot(3)}, run.now)

    record(2, run.works)
    record(int(SETTINGS.startup_seconds), alternates(run))
    assert run.clock.stall() is None  # the deadline is not exceeded yet
    record(1, alternates(run))
    stall = run.stalls()
    assert (stall.waiters, stall.phase) == ((3,), Phase.reward)
    assert (stall.waited_seconds, stall.deadline_seconds) == (3601.0, 3600.0)
    assert stall.sentence == (
        "No step was committed for 1 h, and rank 3 has neither run the model nor scored a reward for 1 h"
        " (deadline 1 h); of rank 3: reward 42 min and score 18 min."
    )


def test_the_rank_that_has_waited_least_says_where_the_time_went() -> None:
    """The others wait for it in the vote."""
    run = Run()
    run.passes(2.0, run.works)
    run.enters(Phase.forward_backward, Phase.reward)
    busy, polls = run.phases, int(SETTINGS.startup_seconds / 4) + 3
    waiting = (OpenPhase(phase=Phase.vote, since_seconds=run.now),)
    for _ in range(polls):
        run.now += 4.0
        slots = {
            rank: make_slot(rank, phases=busy if rank == 1 else waiting, **run.fields) for rank in (0, 1)
        }
        run.clock.record(slots, run.now)
    stall = run.stalls()
    assert "; of rank 1: reward 1 h and score 1 s." in stall.sentence
    assert (
        "rank 0 and rank 1 have neither" in stall.sentence or "ranks 0 and 1 have neither" in stall.sentence
    )


def test_a_gap_of_five_seconds_was_observed_and_a_longer_one_was_not(run: Run) -> None:
    """The clock counts the first and not the second."""

    def silent_after(gap: float) -> float:
        clock = StepClock(SETTINGS, run.now)
        for seconds in (1.0, *[gap] * 1000):
            run.now += seconds
            clock.record({0: run.slot(0), 1: run.slot(1)}, run.now)
        stall = clock.stall()
        return stall.waited_seconds if stall else 0.0

    run.fields["generation_passes"] = 7
    run.enters(Phase.forward_backward, Phase.reward)
    assert silent_after(5.0) == pytest.approx(5000.0)
    assert silent_after(5.1) == 0.0


def test_a_later_step_is_slow_after_five_times_the_longest(run: Run) -> None:
    """Not after ten minutes, if steps of this run take as long; and only of its own call."""
    run.passes(199.0, run.works)
    run.commits()
    run.passes(1.0, run.works)
    run.passes(998.0, run.works)
    assert run.clock.slow_sentence() is None
    run.passes(20.0, run.works)
    sentence = run.clock.slow_sentence()
    assert sentence is not None
    assert sentence.startswith(
        "step 2 is slow but makes progress: it has taken 17 min so far; of rank 0: score 17 min;"
    )
    assert sentence.endswith("when it ends cannot be estimated")
    run.passes(60.0)
    assert run.clock.slow_sentence() is not None  # something was done a minute ago
    run.passes(1.0)
    assert run.clock.slow_sentence() is None
    run.fields["train_call"] = run.fields.get("train_call", 1) + 1
    run.passes(2.0, run.works)
    assert run.clock.deadline_seconds < SETTINGS.ceiling_seconds * 2


class Generating:
    """Ranks that generate, each at a pace and with a limit of its own; time passes in polls. The clock starts
    at 10 s.
    """

    def __init__(self, *, every: dict[int, int], limits: dict[int, float]) -> None:
        self._every, self._limits = every, limits
        self.now, self.since = 10.0, 10.0
        self.passes = dict.fromkeys(every, 100)  # those of an earlier generation
        self.clock = StepClock(SETTINGS, self.now)

    def runs(self, seconds: int) -> str | None:
        """Return what users are told after this time."""
        for _ in range(seconds):
            self.now += POLL
            slots = {}
            for rank, every in self._every.items():
                self.passes[rank] += every > 0 and int(self.now - 10) % every == 0
                slots[rank] = make_slot(
                    rank, voted_step=0, last_work_seconds=self.now, generation_passes=self.passes[rank],
                    generation_limit=self._limits[rank],
                    phases=(OpenPhase(phase=Phase.generate, since_seconds=self.since),),
                )  # fmt: skip
            self.clock.record(slots, self.now)
        return self.clock.slow_sentence()


@pytest.mark.parametrize(
    ("every", "limits", "end"),
    [
        # the slowest pace and the latest end, of the ranks that have a limit
        ({0: 1, 1: 1, 2: 2}, {0: math.nan, 1: 1000.0, 2: 900.0},
         "at 0.5 tokens per second and completion, its generation ends within 20 min"),
        ({0: 1}, {0: 500.0}, "its generation ends within 0.0 s"),  # an estimate is never negative
        ({0: 0}, {0: 500.0}, "when it ends cannot be estimated"),  # the model runs, and no token has come
        ({0: 1}, {0: math.nan}, "when it ends cannot be estimated"),
    ],
)  # fmt: skip
def test_a_slow_generation_is_reported_with_its_end(
    every: dict[int, int], limits: dict[int, float], end: str
) -> None:
    """As far as a limit and a pace are known."""
    assert str(Generating(every=every, limits=limits).runs(620)).endswith(end)


def test_each_generation_has_its_own_pace() -> None:
    """The second of a step is not estimated from the first, which had no limit."""
    ranks = Generating(every={0: 5}, limits={0: 100.0})
    ranks.runs(500)
    ranks.since = ranks.now
    assert "at 0.2 tokens per second and completion, its generation ends within 5 min" in str(ranks.runs(200))


def test_a_step_is_slow_after_ten_minutes() -> None:
    """Not a second sooner. The step begins when the clock first sees it."""
    ranks = Generating(every={0: 1}, limits={0: 5000.0})
    assert ranks.runs(int(SLOW_SECONDS)) is None
    assert ranks.runs(1) is not None


def test_ranks_in_two_calls_have_no_step() -> None:
    """One has begun its next call."""
    run = Run()
    run.clock.record(
        {rank: make_slot(rank, phases=run.phases, train_call=1 + rank) for rank in (0, 1)}, run.now
    )
    assert run.clock.position is None


@pytest.mark.parametrize("state", [state for state in RankState if state is not RankState.training])
def test_only_ranks_that_train_have_a_step(state: RankState) -> None:
    """In every other state, nothing is late."""
    run = Run()
    run.fields["state"] = state
    run.passes(2.0)
    assert run.clock.position is None


@pytest.mark.parametrize("call", [1, 3])
def test_another_call_teaches_nothing(run: Run, call: int) -> None:
    """The step in which a call ends, or is left, was not committed. A repeated call may have a lower
    number.
    """
    run.fields["train_call"] = 2
    run.passes(3000, run.works)
    run.fields["train_call"] = call
    run.passes(10, run.works)
    assert run.clock.deadline_seconds == SETTINGS.startup_seconds


def test_the_three_longest_phases_are_shown(run: Run) -> None:
    """And no more."""
    for phase, polls in (
        (Phase.generate, 1500),
        (Phase.reward, 1000),
        (Phase.score, 900),
        (Phase.optimizer, 800),
    ):
        run.enters(Phase.forward_backward, phase)
        run.passes(polls)
    stall = run.stalls()
    assert stall.sentence.endswith("; of rank 0: generate 25 min, reward 17 min and score 15 min.")
