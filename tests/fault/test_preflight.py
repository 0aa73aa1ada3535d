"""`launch --preflight` examines the machine before each attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.full_disk import SmallDisk, small_disk
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system with room for checkpoints."""
    with small_disk(tmp_path / "disk", 512 * MIB) as made:
        yield made


def test_a_disk_that_has_become_full_is_reported_before_a_restart(
    disk: SmallDisk, runs: Runs, tmp_path: Path
) -> None:
    """Nothing is wrong before the first attempt; the run recovers, and ends in the same weights. Processes of
    runs that other tests kill at the same time may be left for a moment.
    """
    run = runs(
        "--nproc-per-node", "2", "--preflight", str(SCRIPTS / "sft.py"), "--output-dir", str(disk.folder),
        "--max-steps", "12", "--save-steps", "4",
    )  # fmt: skip
    with run.held(after=6):
        run.start().until_step(6)
        run.until_event("checkpoint_published")
        before = run.printed()
        disk.leave(100 * MIB)
        run.kill(1)
    run.ended()
    warnings = [line for line in before.splitlines() if line.startswith("grpo-run: warning: ")]
    assert [line for line in warnings if "left-over processes" not in line] == []
    said = [line for line in run.printed().splitlines() if "warning: disk: " in line]
    assert len(said) == 1, run.tail()
    assert "too little for a checkpoint; make room" in said[0]
    assert digest(disk.folder) == undisturbed("sft.py", 12)


def test_a_missing_interface_keeps_the_run_from_starting(runs: Runs, tmp_path: Path) -> None:
    """Its ranks would wait for each other, and then fail."""
    run = runs(
        "--preflight", str(SCRIPTS / "sft.py"), "--output-dir", "out",
        environment={"GLOO_SOCKET_IFNAME": "nowhere7"},
    ).start()  # fmt: skip
    assert run.wait() == 2
    (line,) = [line for line in run.printed().splitlines() if "--preflight" in line]
    assert "network interfaces: GLOO_SOCKET_IFNAME=nowhere7: there is no such interface" in line
    assert not run.directory.exists()
