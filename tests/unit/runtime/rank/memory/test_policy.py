"""Cleanup is asked for when it pays, and less and less often where it did not."""

from __future__ import annotations

import itertools

import pytest

from grpo_run.runtime.rank.memory.cleanup_policy import (
    COST_FACTOR,
    LEAST_HOST_GROWTH_BYTES,
    PAID_COST_FACTOR,
    SETTLING_STEPS,
    CleanupNeed,
    CleanupOutcome,
    CleanupPolicy,
    StepMemory,
)

MIB, GIB = 2**20, 2**30


class Rank:
    """A rank on a GPU of 80 GiB whose steps take a second, under a policy."""

    def __init__(self, every: int = 10) -> None:
        self.now = 0.0
        self.policy = CleanupPolicy(every, lambda: self.now)
        self.step = 0
        self.allocated, self.reserved, self.peak, self.anonymous = 10 * GIB, 60 * GIB, 58 * GIB, GIB
        self.capacity, self.free = 80 * GIB, 5 * GIB
        self.free_reads = 0

    @property
    def memory(self) -> StepMemory:
        """At the end of the step."""
        return StepMemory(
            allocated=self.allocated, reserved=self.reserved, peak_allocated=self.peak,
            anonymous=self.anonymous, capacity=self.capacity,
        )  # fmt: skip

    def read_free(self) -> int:
        """What the driver says."""
        self.free_reads += 1
        return self.free

    def steps(
        self, number: int, *, device: int = 0, host: int = 0, effective: bool = True, seconds: float = 0.2
    ) -> list[tuple[int, CleanupNeed]]:
        """Take steps, each of which leaves so much more; clean when that is asked for. Return when, and
        what.
        """
        garbage = [0, 0]
        asked = []
        for _ in range(number):
            self.step += 1
            self.now += 1.0
            self.allocated += device
            self.anonymous += host
            garbage[0] += device
            garbage[1] += host
            need = self.policy.observe(self.step, self.memory, self.read_free)
            if not any(need):
                continue
            asked.append((self.step, need))
            freed = garbage if need.collect and effective else [0, 0]
            self.allocated -= freed[0]
            self.anonymous -= freed[1]
            if effective and need.collect:
                garbage = [0, 0]
            self.policy.cleaned(
                CleanupOutcome(seconds=seconds, freed_bytes=freed[1], freed_device_bytes=freed[0]),
                self.memory,
            )
        return asked


def test_a_rank_without_garbage_is_never_cleaned() -> None:
    """Its driver is not asked either."""
    rank = Rank()
    assert rank.steps(2000) == []
    assert rank.free_reads == 0


def test_memory_that_the_first_steps_allocate_is_no_garbage() -> None:
    """The optimizer's state comes with the first step."""
    rank = Rank()
    assert rank.steps(SETTLING_STEPS, device=10 * GIB) == []
    assert rank.steps(100) == []


@pytest.mark.parametrize("where", ["device", "host"])
def test_memory_that_grows_is_collected(where: str) -> None:
    """Again and again, as long as that frees it; the window bounds how much gathers."""
    rank = Rank()
    growth = {where: 200 * MIB}
    asked = rank.steps(300, **growth)
    assert all(need == CleanupNeed(collect=True) for _, need in asked)
    assert len(asked) > 10
    assert rank.allocated < 20 * GIB
    assert rank.anonymous < 8 * GIB


def test_memory_that_varies_is_no_growth() -> None:
    """What counts is the lowest of a window: buffers of a rollout come and go."""
    rank = Rank()
    asked = []
    for _ in range(60):
        rank.anonymous = GIB
        asked += rank.steps(3)
        rank.anonymous = 9 * GIB
        rank.allocated = 20 * GIB
        asked += rank.steps(2)
        rank.allocated = 10 * GIB
    assert asked == []


def test_growth_that_is_no_garbage_is_collected_less_and_less_often() -> None:
    """A cache of the script grows for ever; each attempt needs twice the growth of the one before."""
    rank = Rank()
    asked = rank.steps(4000, host=10 * MIB, effective=False)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(asked)]
    assert 3 <= len(asked) <= 12
    assert gaps == sorted(gaps)
    assert gaps[-1] * 10 * MIB > 20 * LEAST_HOST_GROWTH_BYTES


@pytest.mark.parametrize(("effective", "factor"), [(False, COST_FACTOR), (True, PAID_COST_FACTOR)])
def test_cleaning_takes_a_small_part_of_the_time_at_most(effective: bool, factor: float) -> None:
    """However much memory grows: a collection of 3 s is not repeated for 60 s if it has helped, and 300 s if
    it has not.
    """
    rank = Rank()
    asked = rank.steps(2000, host=GIB // 4, seconds=3.0, effective=effective)
    assert len(asked) >= 2
    assert min(later - earlier for (earlier, _), (later, _) in itertools.pairwise(asked)) >= 3 * factor


def test_caches_are_released_if_no_step_needs_them_and_the_device_is_nearly_full() -> None:
    """Above the highest peak of the window, not above what is allocated at the end of a step."""
    rank = Rank()
    rank.reserved = 70 * GIB
    asked = rank.steps(2 * 10 + SETTLING_STEPS)
    assert [need for _, need in asked][:1] == [CleanupNeed(release=True)]


@pytest.mark.parametrize("reason", ["used", "not scarce", "small", "no device"])
def test_caches_are_kept_if_releasing_them_does_not_pay(reason: str) -> None:
    """The next step would allocate them again, or nobody needs them."""
    rank = Rank()
    rank.reserved = 70 * GIB
    if reason == "used":
        rank.peak = 68 * GIB
    elif reason == "not scarce":
        rank.free = 20 * GIB
    elif reason == "small":
        rank.peak = 67 * GIB
    else:
        rank.capacity = 0
    assert rank.steps(500) == []


def test_a_release_that_does_not_last_is_repeated_less_and_less_often() -> None:
    """The allocator reserves the same again."""
    rank = Rank()
    rank.reserved = 70 * GIB
    assert 1 <= len(rank.steps(2000)) <= 3


def test_nothing_is_asked_for_if_cleanup_is_off() -> None:
    """`--cleanup-every 0`."""
    rank = Rank(every=0)
    rank.reserved = 70 * GIB
    assert rank.steps(300, device=GIB, host=GIB) == []


def test_a_cleaning_that_another_rank_has_asked_for_is_no_failure_of_ones_own() -> None:
    """It frees nothing here, and growth of this rank's own is collected as early as before."""
    rank = Rank()
    rank.steps(15)
    for _ in range(8):
        rank.policy.cleaned(CleanupOutcome(seconds=0.01), rank.memory)
    before = rank.step
    (first, _), *_ = rank.steps(60, host=100 * MIB)
    assert first - before <= 30
