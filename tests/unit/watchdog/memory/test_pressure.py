"""When host memory is short."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.memory.host_pressure import is_short, shortage
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
