"""When memory is short, and when it runs out: only ranks that grow until the limit are a reason for a
restart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from grpo_run.watchdog.memory.host_pressure import Growth, Urgency, is_short, shortage
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, ProcessMemory

GIBIBYTE = 1 << 30
LIMIT = 100 * GIBIBYTE


def use(fraction: float, limit_bytes: int = LIMIT) -> LimitUse:
    """A limit of which a part is used."""
    used = int(fraction * limit_bytes)
    return LimitUse(
        name="the limit", limit_bytes=limit_bytes, usage_bytes=limit_bytes, working_set_bytes=used
    )


def sample(fraction: float, **fields: object) -> HostSample:
    """Ranks that use a part of the limit alone."""
    rank = ProcessMemory(anonymous_bytes=int(fraction * LIMIT), file_bytes=0, shared_bytes=0)
    return HostSample(at=0.0, limits=(use(fraction),), ranks={0: rank}, **fields)  # type: ignore[arg-type]


def urgency(fractions: Iterable[float], *, seconds: float = 1.0, per_step: int = 1) -> Urgency:
    """The urgency after ranks have used these parts of the limit, one after the other.

    Args:
        seconds: between two samples.
        per_step: samples in a step.
    """
    growth = Growth()
    last = 0.0
    for number, last in enumerate(fractions):
        growth.record(sample(last), (1, 1 + number // per_step), number * seconds)
    return growth.urgency(use(last))


@pytest.mark.parametrize(
    ("fraction", "limit_bytes", "ranks", "short"),
    [
        (0.89, LIMIT, 8, False),
        (0.91, LIMIT, 8, True),
        (0.98, 2000 * GIBIBYTE, 8, False),  # 40 GiB are enough for any step
        (0.99, 2000 * GIBIBYTE, 8, True),
        (0.85, GIBIBYTE, 2, False),
        (0.87, GIBIBYTE, 2, True),  # two ranks and the drain worker need 144 MiB to exit
    ],
)
def test_memory_is_short_when_a_tenth_of_the_limit_is_left(
    fraction: float, limit_bytes: int, ranks: int, short: bool
) -> None:
    """Between a lower bound for small limits and an upper one for large machines."""
    assert is_short(use(fraction, limit_bytes), ranks) is short


def test_page_cache_is_no_shortage() -> None:
    """`use` has the whole limit in use, most of it page cache."""
    assert shortage(sample(0.5)) is None
    assert shortage(sample(0.95)) == "95% of the limit is in use"


def test_waiting_for_memory_is_a_shortage_below_the_limit() -> None:
    """PSI over 10 %."""
    assert shortage(sample(0.5, full_pressure=0.09)) is None
    text = shortage(sample(0.5, full_pressure=0.12, cgroup="/job"))
    assert text == "the processes of /job have waited for memory for 12% of the last 10 s"


def test_a_leak_is_urgent_early_if_a_restart_gives_much_back() -> None:
    """From 60 % to 91 % by 1 % each second: 9 s are left. The same within minutes is early."""
    assert urgency(0.60 + 0.01 * n for n in range(32)) is Urgency.late
    assert urgency((0.60 + 0.01 * n for n in range(32)), seconds=20.0) is Urgency.eager


def test_a_leak_that_takes_days_is_not_urgent_yet() -> None:
    """An hour for each percent."""
    assert urgency((0.60 + 0.01 * n for n in range(32)), seconds=3600.0) is Urgency.none


def test_a_leak_on_top_of_much_steady_use_waits_until_late() -> None:
    """A restart gives back less than 5 % of the limit, so it is made as late as possible."""
    assert urgency(0.94 + 0.002 * n for n in range(10)) is Urgency.none
    assert urgency(0.94 + 0.002 * n for n in range(22)) is Urgency.late


HEALTHY: dict[str, Callable[[int], float]] = {
    "steady": lambda n: 0.95,
    "noise": lambda n: 0.93 + 0.01 * random.Random(n).random(),
    "phases": lambda n: 0.90 + 0.05 * math.sin(n / 3),
    "warm-up that ends": lambda n: min(0.93, 0.5 + 0.02 * n),
    "warm-up that fades": lambda n: 0.93 - 0.4 * 0.8**n,
    "shrinking": lambda n: 0.95 - 0.001 * n,
    "one jump": lambda n: 0.80 if n < 45 else 0.94,
    "slow drift of an allocator": lambda n: 0.93 + 0.000_01 * n,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seconds", [0.2, 1.0, 30.0])
def test_a_run_that_does_not_grow_until_the_limit_is_left_alone(name: str, seconds: float) -> None:
    """At any time from where memory is short, however near the limit it is."""
    shape = HEALTHY[name]
    growth = Growth()
    for number in range(60):
        growth.record(sample(shape(number)), (1, number + 1), number * seconds)
        settled = name != "warm-up that ends" or number >= 32
        if shape(number) > 0.9 and settled:
            assert growth.urgency(use(shape(number))) is Urgency.none, number


def test_what_happens_within_a_step_is_no_growth() -> None:
    """Memory rises by a third within each step, and falls again."""
    assert urgency((0.60 + 0.035 * (n % 10) for n in range(99)), per_step=10) is Urgency.none


def test_a_leak_is_seen_through_what_happens_within_a_step() -> None:
    """Peaks of steps rise by half a percent."""
    leak = (0.50 + 0.035 * (n % 10) + 0.005 * (n // 10) for n in range(160))
    assert urgency(leak, per_step=10) is not Urgency.none


def test_another_train_call_is_another_beginning() -> None:
    """Its model may be larger: what the first call used is no trend."""
    growth = Growth()
    for number in range(40):
        growth.record(sample(0.5 + 0.01 * number), (1 if number < 38 else 2, number), float(number))
    assert growth.urgency(use(0.9)) is Urgency.none
