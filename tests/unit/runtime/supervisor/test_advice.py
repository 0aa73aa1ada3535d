"""What a user could change in a healthy run: said once, and only if it was measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from support.memory_cases import GRPO

from grpo_run.runtime.supervisor.advice import Advice, Waits
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.awaited import SHORTEST_WAIT_SECONDS, AwaitedRank

POLL_SECONDS = 0.3
Step = Sequence[float]
"""How long each rank works in a step until it waits for the others."""


class Clock:
    """Steps of ranks, as the supervisor sees them at each poll: who waits by the logs, or else the rank that
    works longest, once others have waited for some seconds.

    Args:
        logged: waits are in the logs, not in C++ or on a device.
    """

    def __init__(self, advice: Advice | Waits, *, logged: bool = True) -> None:
        self.advice = advice
        self.logged = logged
        self.now = 100.0
        self.sentence: str | None = None
        self.told_at: int | None = None

    def steps(
        self, steps: Sequence[Step], phase: Phase = Phase.generate, common_seconds: float = 0.2
    ) -> str | None:
        """Take steps, and return what has been said first; `told_at` is the number of its step.

        Args:
            common_seconds: of each step, in which no rank waits.
        """
        for number, works in enumerate(steps, 1):
            began, longest = self.now, max(works)
            while self.now < began + longest + common_seconds:
                self.now += POLL_SECONDS
                least = 0.2 if self.logged else SHORTEST_WAIT_SECONDS
                waiters = tuple(
                    rank
                    for rank, seconds in enumerate(works)
                    if seconds + least <= self.now - began < longest
                )
                awaited = AwaitedRank(
                    rank=works.index(longest), phase=phase, since_seconds=began, deadline_at_seconds=1e9,
                    busy=True, waiters=waiters,
                )  # fmt: skip
                waits = self.advice if isinstance(self.advice, Waits) else self.advice.waits
                if waits is not None:
                    waits.polled(
                        dict.fromkeys(range(len(works)), phase),
                        waiters if self.logged else (),
                        awaited if waiters and not self.logged else None,
                        self.now,
                    )
            if isinstance(self.advice, Waits):
                self.advice.committed(self.now)
                if self.sentence is None and self.advice.sentence is not None:
                    self.sentence, self.told_at = self.advice.sentence, number
            else:
                self.advice.committed(self.now)
        return self.sentence


def test_a_rank_that_is_always_the_longest_is_named_after_eight_steps() -> None:
    """Steps 1 to 4 are even."""
    clock = Clock(Waits(), logged=False)
    text = clock.steps([(1, 1)] * 4 + [(1, 12)] * 20)
    assert clock.told_at == 12
    assert text == (
        "ranks wait for one another in generate, 11 s in 8 of the last 11 steps, 86% of their time: the"
        " others wait for rank 1. To change that, shuffle the data set, sort or bucket it by length, or cap"
        " the completions (max_completion_length, `--generation`), or find out why this rank is slower"
    )


def test_ranks_that_take_turns_are_named_together() -> None:
    text = Clock(Waits()).steps([(1, 12), (12, 1)] * 10)
    assert text is not None
    assert "they wait now for one and now for another of ranks 0 and 1. To change that, shuffle" in text


UNEVEN: dict[str, tuple[list[Step], Phase]] = {
    "in the passes of training": ([(1, 12)] * 20, Phase.forward_backward),
    "in the scores": ([(12, 1)] * 20, Phase.score),
    "in a reward": ([(1, 12)] * 20, Phase.reward),
    "half of a step": ([(3, 6)] * 20, Phase.generate),
    "one of eight ranks": ([(12, *[5] * 7)] * 20, Phase.generate),
    "one rollout for four steps": ([(1, 12), (1, 1), (1, 1), (1, 1)] * 13, Phase.generate),
    "late in the run": ([(8, 8)] * 200 + [(1, 12)] * 25, Phase.generate),
    "lengths by chance": ([(random.Random(n).choice([1, 12]), 6) for n in range(60)], Phase.generate),
}


@pytest.mark.parametrize("how", UNEVEN)
@pytest.mark.parametrize("logged", [True, False])
def test_ranks_that_wait_are_told(how: str, logged: bool) -> None:
    steps, phase = UNEVEN[how]
    text = Clock(Waits(), logged=logged).steps(steps, phase)
    assert text is not None
    assert text.startswith(f"ranks wait for one another in {phase.name}, ")


def _differ(least: float, most: float, seed: int = 1) -> list[Step]:
    """Steps in which each of four ranks takes a random time."""
    source = random.Random(seed)
    return [[source.uniform(least, most) for _ in range(4)] for _ in range(100)]


EVEN: dict[str, tuple[list[Step], Phase]] = {
    "equal": ([(12, 12)] * 60, Phase.generate),
    "a quarter of a step": ([(9, 12)] * 60, Phase.generate),
    "differences by chance": (_differ(9, 12), Phase.generate),
    "milliseconds": ([(0.001, 0.09)] * 300, Phase.generate),
    "less than two seconds": ([(0.1, 1.9)] * 60, Phase.generate),
    "a busy machine": (_differ(0.3, 2.2), Phase.forward_backward),
    "one long step": ([(1, 1)] * 20 + [(1, 600)] + [(1, 1)] * 40, Phase.generate),
    "the first steps": (
        [(1, 300), (1, 60), (1, 30), (1, 30), (1, 30)] + [(2, 2)] * 60,
        Phase.forward_backward,
    ),
    "a long step now and then": (([(2, 2)] * 9 + [(2, 9)]) * 10, Phase.generate),
    "one of eight ranks has little": ([(1, *[12] * 7)] * 60, Phase.generate),
    "a save of one rank": ([(1, 12)] * 60, Phase.checkpoint),
    "a data set that one rank reads for all": ([(12, 1)] * 60, Phase.data),
}


@pytest.mark.parametrize("why", EVEN)
@pytest.mark.parametrize("logged", [True, False])
def test_usual_differences_are_not_told(why: str, logged: bool) -> None:
    steps, phase = EVEN[why]
    assert Clock(Waits(), logged=logged).steps(steps, phase) is None


def test_waits_in_each_part_of_an_accumulated_step_are_told() -> None:
    """Four of a second, after which the logs show for a moment that nobody waits."""
    waits, now = Waits(), 0.0
    for poll in range(20 * 16):
        now += POLL_SECONDS
        waits.polled(dict.fromkeys((0, 1), Phase.forward_backward), (0,) if poll % 4 else (), None, now)
        if poll % 16 == 0:
            waits.committed(now)
    assert waits.sentence is not None
    assert waits.sentence.startswith(
        "ranks wait for one another in forward_backward, 4 s in 19 of the last 19"
    )


def test_the_only_rank_of_a_run_waits_for_nobody() -> None:
    assert Clock(Waits()).steps([(12,)] * 20) is None
    assert Clock(Waits(), logged=False).steps([(12,)] * 20) is None


def test_a_wait_that_the_logs_have_shown_ends_with_them() -> None:
    """The last check of who is awaited is up to a second old: a quarter of a step stays one."""
    waits = Waits()
    awaited = AwaitedRank(
        rank=1, phase=Phase.generate, since_seconds=0, deadline_at_seconds=1e9, busy=True, waiters=(0,)
    )
    for poll in range(800):  # of 12 s, the logs show a wait for 3 s, and the check for another second
        part = poll % 40
        waits.polled(
            dict.fromkeys((0, 1), Phase.generate),
            (0,) if 10 <= part < 20 else (),
            awaited if 17 <= part < 24 else None,
            POLL_SECONDS * poll,
        )
        if part == 39:
            waits.committed(POLL_SECONDS * poll)
    assert waits.sentence is None


def test_a_pause_of_the_supervisor_is_no_wait() -> None:
    """What it has not seen does not count."""
    waits = Waits()
    clock = Clock(waits)
    for _ in range(20):
        clock.steps([(1, 4)], common_seconds=6)
        clock.now += 60
    assert waits.sentence is None


def advised(facts: Callable[[], object] = lambda: GRPO) -> tuple[Advice, dict[str, str]]:
    """An advice, and what it has said, by subject."""
    said: dict[str, str] = {}
    return Advice(facts, said, said.__setitem__), said  # type: ignore[arg-type]


def test_the_advice_is_given_once_in_a_run() -> None:
    """Also if another attempt, or another launch with the same history, sees the same."""
    advice, said = advised()
    for _ in range(2):
        advice.begin_attempt()
        Clock(advice).steps([(1, 12)] * 20)
    assert list(said) == ["balance"]
    said["balance"] = "said before"
    advice.begin_attempt()
    assert advice.waits is None  # nothing is measured for it any more
    Clock(advice).steps([(1, 12)] * 20)
    assert said["balance"] == "said before"


def test_ranks_wait_by_design_for_the_one_that_asks_a_server_of_vllm() -> None:
    """In generation only."""
    advice, said = advised(lambda: GRPO.model_copy(update={"generates": "vllm_server"}))
    Clock(advice).steps([(12, 1)] * 20)
    assert said == {}
    Clock(advice).steps([(12, 1)] * 20, Phase.forward_backward)
    assert list(said) == ["balance"]
