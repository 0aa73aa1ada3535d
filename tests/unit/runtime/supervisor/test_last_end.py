"""How the next launch reports a supervisor that the kernel has probably killed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.progress import WallTime
from grpo_run.runtime.memory.host_cgroup import read_cgroup_kills
from grpo_run.runtime.supervisor.host_watch import RECENT_SECONDS, suspected
from grpo_run.watchdog.memory.host_sample import CgroupKills, HostSample, LimitUse

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


@pytest.fixture
def counted(tmp_path: Path) -> CgroupKills:
    """The supervisor's cgroup, in which the kernel had killed two processes at the last sample."""
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    found = read_cgroup_kills(str(tmp_path))
    assert found is not None
    assert found.count == 2
    return found


def test_a_counter_that_rose_as_the_supervisor_ended_names_the_kernel(counted: CgroupKills) -> None:
    """Read by the guardian; memory may have filled up within the second after the last sample."""
    sample = dataclasses.replace(WIDE, supervisor_kills=counted, kills_at_end=3)
    text = suspected(sample, history())
    assert text is not None
    assert text.startswith(
        "the last supervisor of this run was killed by the kernel because memory was full: as it ended, the"
        f" counter of killed processes of {counted.folder} rose from 2 to 3. At "
    )


def test_a_counter_that_did_not_rise_clears_the_kernel_even_if_memory_was_short(counted: CgroupKills) -> None:
    """Somebody else has killed it: at its end by the guardian's reading, or later while the cgroup still
    exists.
    """
    assert suspected(dataclasses.replace(SHORT, supervisor_kills=counted, kills_at_end=2), history()) is None
    assert suspected(dataclasses.replace(SHORT, supervisor_kills=counted), history()) is None


def test_a_rise_that_nobody_saw_at_the_time_is_not_taken_for_the_supervisor(counted: CgroupKills) -> None:
    """The guardian has died too: others may have been killed in the cgroup since."""
    Path(counted.folder, "memory.oom_control").write_text("oom_kill 5\n")
    text = suspected(dataclasses.replace(WIDE, supervisor_kills=counted), history())
    assert text is not None
    assert f"killed 3 processes of {counted.folder} since" in text
    assert "whether the supervisor was one of them cannot be told" in text


def test_another_cgroup_of_the_same_name_says_nothing(counted: CgroupKills) -> None:
    """A new container, or another start of the machine, has a counter of its own."""
    Path(counted.folder, "memory.oom_control").write_text("oom_kill 5\n")
    other = dataclasses.replace(counted, identity="another boot 7")
    assert suspected(dataclasses.replace(WIDE, supervisor_kills=other), history()) is None
    text = suspected(dataclasses.replace(SHORT, supervisor_kills=other), history())
    assert text is not None
    assert "probably killed by the kernel" in text
