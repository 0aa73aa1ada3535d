"""How the next launch reports a supervisor that the kernel has probably killed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.history_parts.wall_time import WallTime
from grpo_run.runtime.supervision.host_memory.last_end import RECENT_SECONDS, suspected
from grpo_run.watchdog.host_memory.sample import HostSample, LimitUse

LIMIT = LimitUse(
    name="the memory cgroup /job", limit_bytes=100 << 30, usage_bytes=99 << 30, working_set_bytes=97 << 30
)
SHORT = HostSample(at=1000.0, limits=(LIMIT,), kills=2, kills_whole_group=True)
WIDE = dataclasses.replace(SHORT, limits=(dataclasses.replace(LIMIT, working_set_bytes=50 << 30),))


def history(**changes: object) -> History:
    """A run whose supervisor has written its last event a second after the sample, and no end."""
    fields: dict[str, object] = {
        "supervisors": 1,
        "exit_code": None,
        "time": WallTime(last=1001.0),
        **changes,
    }
    return History(**fields)  # type: ignore[arg-type]


def test_a_silent_end_while_memory_was_short_is_reported_as_probable() -> None:
    """With what was used, and why everything ended together."""
    text = suspected(SHORT, history())
    assert text is not None
    assert "probably killed by the kernel because memory was full" in text
    assert "97% of the memory cgroup /job was in use" in text
    assert "memory.oom.group=1" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"supervisors": 0},
        {"exit_code": 75},
        {"exit_code": 93},
        {"time": WallTime(last=1001.0 + RECENT_SECONDS)},
    ],
)
def test_an_end_in_order_or_another_time_is_not_reported(changes: dict[str, object]) -> None:
    """A first launch, a stop, a run that was given up, or a sample of a supervisor before the last one."""
    assert suspected(SHORT, history(**changes)) is None


def test_a_silent_end_with_memory_to_spare_is_not_reported() -> None:
    """`kill -9` of the supervisor, or a power failure."""
    assert suspected(WIDE, history()) is None
    assert suspected(None, history()) is None


def test_a_counter_that_has_risen_since_is_reported(tmp_path: Path) -> None:
    """If the cgroup still exists: memory may have filled up within the second after the last sample."""
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    text = suspected(dataclasses.replace(WIDE, cgroup=str(tmp_path)), history())
    assert text is not None
    assert "has killed 3 processes of that cgroup since" in text
