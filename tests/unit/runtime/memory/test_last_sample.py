"""The last sample outlives its writer, and a damaged one is unknown."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from grpo_run.runtime.memory.host_last_sample import FILE_BYTES, LastSample, read_last_sample
from grpo_run.watchdog.memory.host_sample import HostSample, ProcessMemory

ONE = ProcessMemory(anonymous_bytes=1 << 40, file_bytes=1 << 40, shared_bytes=1 << 40, pinned_bytes=1 << 40)


def test_the_newest_sample_is_read_from_the_file(tmp_path: Path) -> None:
    """A shorter record after a longer one is read whole; only the owner may read it."""
    path = tmp_path / "sample"
    last = LastSample(path)
    assert read_last_sample(path) is None
    last.write(HostSample(at=1.0, ranks=dict.fromkeys(range(8), ONE)))
    last.write(HostSample(at=2.0))
    assert read_last_sample(path) == HostSample(at=2.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_more_ranks_than_fit_are_left_out(tmp_path: Path) -> None:
    """300 ranks fit, 3,000 do not; the limits are kept."""
    path = tmp_path / "sample"
    last = LastSample(path)
    last.write(HostSample(at=1.0, ranks=dict.fromkeys(range(300), ONE)))
    found = read_last_sample(path)
    assert found is not None
    assert len(found.ranks) == 300
    last.write(HostSample(at=2.0, ranks=dict.fromkeys(range(3000), ONE)))
    assert read_last_sample(path) == HostSample(at=2.0)


@pytest.mark.parametrize("content", [None, b"", b"\0" * FILE_BYTES, b"{}\nx", b"x" * 100])
def test_a_file_without_a_sample_is_none(content: bytes | None, tmp_path: Path) -> None:
    """Missing, empty, never written, damaged, or of another version."""
    path = tmp_path / "sample"
    if content is not None:
        path.write_bytes(content)
    assert read_last_sample(path) is None


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    """The samples are then known to the supervisor only."""
    LastSample(tmp_path / "missing" / "sample").write(HostSample(at=1.0))


def test_a_truncated_file_is_written_anew(tmp_path: Path) -> None:
    """Access to a mapping would end the supervisor with SIGBUS."""
    path = tmp_path / "sample"
    last = LastSample(path)
    last.write(HostSample(at=1.0))
    os.truncate(path, 0)
    last.write(HostSample(at=2.0))
    assert read_last_sample(path) == HostSample(at=2.0)
