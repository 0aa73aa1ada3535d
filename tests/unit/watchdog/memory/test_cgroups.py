"""Memory cgroups of versions 1 and 2, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.watchdog.memory.cgroups import memory_cgroups

MEBIBYTE = 1 << 20
V1 = {
    "memory.limit_in_bytes": f"{1000 * MEBIBYTE}\n",
    "memory.usage_in_bytes": f"{950 * MEBIBYTE}\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory.failcnt": "17\n",
    "memory.stat": (
        f"cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file {100 * MEBIBYTE}\ntotal_active_file"
        f" {400 * MEBIBYTE}\nshmem 1\ntotal_shmem {30 * MEBIBYTE}\n"
    ),
}
V2 = {
    "memory.max": f"{1000 * MEBIBYTE}\n",
    "memory.current": f"{950 * MEBIBYTE}\n",
    "memory.events": "low 0\nhigh 0\nmax 40\noom 17\noom_kill 3\noom_group_kill 0\n",
    "memory.stat": (
        f"anon 5\ninactive_file {100 * MEBIBYTE}\nactive_file {400 * MEBIBYTE}\nshmem {30 * MEBIBYTE}\n"
    ),
    "memory.pressure": (
        "some avg10=40.00 avg60=1.00 avg300=0.00 total=9\nfull avg10=12.50 avg60=0.50 avg300=0.00 total=5\n"
    ),
    "memory.oom.group": "1\n",
}


@pytest.mark.parametrize(
    ("root", "membership", "files"),
    [("memory", b"4:memory:/job\n0::/\n", V1), (".", b"0::/job\n", V2)],
    ids=["version 1", "version 2"],
)
def test_every_figure_is_read_from_both_versions(
    root: str, membership: bytes, files: dict[str, str], tmp_path: Path
) -> None:
    """Limit, use, kills and met limits; a page cache of 500 MiB, mapped often or not, is no part of the
    working set.
    """
    folder = tmp_path / root / "job"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    group = memory_cgroups(membership, tmp_path)[0]
    assert group.limit_bytes() == 1000 * MEBIBYTE
    assert group.usage_bytes() == 950 * MEBIBYTE
    assert group.working_set() == (450 * MEBIBYTE, 30 * MEBIBYTE)
    assert group.reclaimable_bytes() == 100 * MEBIBYTE
    assert group.kills() == 3
    assert group.limit_hits() == 17
    assert group.full_pressure() == (None if files is V1 else 0.125)
    assert group.kills_whole_group == (files is V2)


def test_a_kill_among_the_descendants_of_a_cgroup_is_not_its_own(tmp_path: Path) -> None:
    """Version 2 adds them up in `memory.events`; a neighbor's kill below a common parent is none of the
    run's.
    """
    (tmp_path / "memory.events").write_text("oom 17\noom_kill 3\n")
    (tmp_path / "memory.events.local").write_text("oom 0\noom_kill 0\n")
    assert memory_cgroups(b"0::/\n", tmp_path)[0].kills() == 0


def test_what_a_cgroup_does_not_have_is_unknown(tmp_path: Path) -> None:
    """The root of version 2 has no limit, no use and no events."""
    group = memory_cgroups(b"0::/\n", tmp_path)[0]
    assert group.limit_bytes() is group.usage_bytes() is group.working_set() is None
    assert group.kills() is group.limit_hits() is group.full_pressure() is None
    assert not group.kills_whole_group


@pytest.mark.parametrize("content", [b"", b"some avg10=1.00\n", b"full total=3\n", b"full avg10=x\n"])
def test_a_pressure_file_without_the_average_is_unknown(content: bytes, tmp_path: Path) -> None:
    """A kernel without PSI, or of another form, is no pressure of 0."""
    (tmp_path / "memory.pressure").write_bytes(content)
    assert memory_cgroups(b"0::/\n", tmp_path)[0].full_pressure() is None
