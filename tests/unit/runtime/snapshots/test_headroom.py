"""Headroom: every limit is measured, and a reserve of each stays free."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.snapshots import headroom
from grpo_run.runtime.snapshots.headroom import (
    MEMORY_RESERVE,
    Headroom,
    cgroup_headroom,
    least_headroom,
    machine_headroom,
    measure_headroom,
)


def group(folder: Path, **files: str) -> None:
    """Create the folder of a cgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.mark.parametrize(
    ("total", "free", "usable"),
    [
        (1 << 30, 1 << 30, (1 << 30) - (64 << 20)),  # 5 % would be less than the least reserve
        (40 << 30, 30 << 30, 28 << 30),
        (1000 << 30, 50 << 30, 46 << 30),  # and 5 % of a large machine more than the most
        (1 << 30, 10 << 20, 0),
        (32 << 20, 32 << 20, 0),
    ],
)
def test_a_reserve_stays_free(total: int, free: int, usable: int) -> None:
    """5 % of the limit, at least 64 MiB and at most 4 GiB."""
    assert Headroom(name="a limit", free_bytes=free, total_bytes=total).usable_bytes == usable


@pytest.mark.parametrize(
    ("total", "free", "usable"),
    [
        (1000 << 20, 300 << 20, 44 << 20),  # 15 % would be less than the least reserve
        (100 << 30, 40 << 30, 25 << 30),
        (2000 << 30, 50 << 30, 2 << 30),  # and 15 % of a large machine more than the most
        (100 << 30, 15 << 30, 0),
    ],
)
def test_more_stays_free_of_memory_than_of_a_file_system(total: int, free: int, usable: int) -> None:
    """15 % of the limit, at least 256 MiB and at most 48 GiB: files in memory outlive the ranks, which must
    find room.
    """
    kib = {"MemTotal": total >> 10, "MemAvailable": free >> 10}
    machine = machine_headroom("".join(f"{name}: {size} kB\n" for name, size in kib.items()).encode())
    assert machine is not None
    assert machine.usable_bytes == usable


def test_the_limits_of_this_machine_are_measured(tmp_path: Path) -> None:
    """The file system and the memory exist on every machine; the least headroom is one of the limits."""
    found = measure_headroom(tmp_path)
    assert [limit.name for limit in found[:2]] == [f"the file system of {tmp_path}", "the machine's memory"]
    assert all(0 <= limit.free_bytes <= limit.total_bytes for limit in found[:2])
    assert least_headroom(tmp_path).name in {limit.name for limit in found}


def test_the_least_headroom_has_the_fewest_usable_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Free bytes are not compared."""
    wide = Headroom(name="wide", free_bytes=4 << 30, total_bytes=1000 << 30)
    narrow = Headroom(name="narrow", free_bytes=3 << 30, total_bytes=4 << 30)
    monkeypatch.setattr(headroom, "measure_headroom", lambda folder: [narrow, wide])
    assert least_headroom(tmp_path) is wide


def test_the_machines_headroom_is_memavailable() -> None:
    """MemFree is not used."""
    found = machine_headroom(b"MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    assert found == Headroom(
        name="the machine's memory", free_bytes=600 * 1024, total_bytes=1000 * 1024, reserve=MEMORY_RESERVE
    )


def test_a_kernel_without_memavailable_gives_no_limit() -> None:
    """The other limits still apply."""
    assert machine_headroom(b"MemTotal: 1000 kB\n") is None


def test_limits_of_cgroup_version_2_are_read_from_every_ancestor(tmp_path: Path) -> None:
    """An ancestor may have the lower limit; "max" is no limit; unused page cache counts as free."""
    outer, middle, inner = tmp_path / "job", tmp_path / "job/step", tmp_path / "job/step/rank"
    group(outer, memory__max="1000\n", memory__current="700\n", memory__stat="anon 5\ninactive_file 50\n")
    group(middle, memory__max="max\n", memory__current="700\n")
    group(inner, memory__max="900\n", memory__current="200\n")
    assert cgroup_headroom(b"0::/job/step/rank\n", tmp_path) == [
        Headroom(name=f"the memory cgroup {inner}", free_bytes=700, total_bytes=900, reserve=MEMORY_RESERVE),
        Headroom(name=f"the memory cgroup {outer}", free_bytes=350, total_bytes=1000, reserve=MEMORY_RESERVE),
    ]


def test_limits_of_cgroup_version_1_are_read(tmp_path: Path) -> None:
    """From the memory controller's hierarchy; a number near 2**63 is no limit."""
    inner = tmp_path / "memory/job"
    group(
        inner,
        memory__limit_in_bytes="900\n",
        memory__usage_in_bytes="1000\n",
        memory__stat="total_inactive_file 30\n",
    )
    group(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="5\n")
    assert cgroup_headroom(b"9:cpu:/elsewhere\n4:hugetlb,memory:/job\n0::/\n", tmp_path) == [
        Headroom(name=f"the memory cgroup {inner}", free_bytes=0, total_bytes=900, reserve=MEMORY_RESERVE)
    ]


def test_the_cgroup_of_a_container_is_found_at_the_root(tmp_path: Path) -> None:
    """The path is the host's and does not exist in the container."""
    group(tmp_path, memory__max="1000\n", memory__current="100\n")
    (found,) = cgroup_headroom(b"0::/docker/abc\n", tmp_path)
    assert found.free_bytes == 900


def test_a_cgroup_path_outside_the_root_is_not_followed(tmp_path: Path) -> None:
    """A cgroup namespace shows groups outside of it with leading dots."""
    group(tmp_path, memory__max="1000\n", memory__current="100\n")
    assert len(cgroup_headroom(b"0::/../other\n", tmp_path)) <= 2
