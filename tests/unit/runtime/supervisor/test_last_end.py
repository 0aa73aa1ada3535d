"""How the next launch reports a supervisor that the kernel has probably killed."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.wall_states import WallStates
from grpo_run.runtime.supervisor.host_watch import RECENT_SECONDS, suspected
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse

LIMIT = LimitUse(
    name="the memory cgroup /job", limit_bytes=100 << 30, usage_bytes=99 << 30, working_set_bytes=97 << 30
)
SHORT = HostSample(at=1000.0, limits=(LIMIT,), kills=2, cgroup="/job", kills_whole_group=True)
WIDE = dataclasses.replace(SHORT, limits=(dataclasses.replace(LIMIT, working_set_bytes=50 << 30),))


def history(**changes: object) -> History:
    """A run whose supervisor has written its last event a second after the sample, and no end."""
    fields: dict[str, object] = {
        "supervisors": 1,
        "exit_code": None,
        "wall": WallStates(last=1001.0),
        **changes,
    }
    return History(**fields)  # type: ignore[arg-type]


def test_a_silent_end_while_memory_was_short_is_reported_as_probable() -> None:
    """With what was used, and why everything ended together. A counter that is not known says nothing."""
    for sample in (SHORT, dataclasses.replace(SHORT, kills=None, kills_at_end=3)):
        text = suspected(sample, history())
        assert text is not None
        assert "probably killed by the kernel because memory was full" in text
        assert "97% of the memory cgroup /job is in use" in text
        assert "memory.oom.group=1" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"supervisors": 0},
        {"exit_code": 75},
        {"exit_code": 93},
        {"wall": WallStates(last=1001.0 + RECENT_SECONDS)},
    ],
)
def test_an_end_in_order_or_another_time_is_not_reported(changes: dict[str, object]) -> None:
    """A first launch, a stop, a run that was given up, or a sample of a supervisor before the last one."""
    assert suspected(SHORT, history(**changes)) is None


@pytest.mark.parametrize("sample", [None, WIDE, dataclasses.replace(SHORT, kills_at_end=2)])
def test_an_end_that_the_kernel_has_no_part_in_is_not_reported(sample: HostSample | None) -> None:
    """Memory to spare; or the guardian has read a counter that did not rise, although memory was short."""
    assert suspected(sample, history()) is None


def test_a_counter_that_rose_as_the_supervisor_ended_names_the_kernel() -> None:
    """Read by the guardian; memory may have filled up within the second after the last sample."""
    text = suspected(dataclasses.replace(WIDE, kills_at_end=3), history())
    assert text is not None
    assert text.startswith(
        "the last supervisor of this run was killed by the kernel because memory was full: as it ended, the"
        " counter of killed processes of /job rose from 2 to 3. Its last sample, at "
    )
