"""Whose a staging area is: private folders, names, locks, and what an area is found by."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_run.runtime.snapshots import ownership as folder_module
from grpo_run.runtime.snapshots.ownership import (
    EARLIER,
    LockedArea,
    describe_owner,
    find_area,
    lock_area,
    mount_namespace,
    private_folder,
    recorded_areas,
    take_area,
)

# ---- the folder of a user ----


def test_the_folder_is_private_and_found_again(tmp_path: Path) -> None:
    """Mode 0700, named by the user."""
    found = private_folder(tmp_path)
    assert found == tmp_path / f"grpo-run-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert private_folder(tmp_path) == found


@pytest.mark.parametrize("mode", [0o750, 0o704, 0o770, 0o777])
def test_a_folder_open_to_others_is_left_alone(tmp_path: Path, mode: int) -> None:
    """Its contents are neither trustworthy nor private; another name is used."""
    taken = tmp_path / f"grpo-run-{os.getuid()}"
    taken.mkdir()
    taken.chmod(mode)
    found = private_folder(tmp_path)
    assert found == tmp_path / f"grpo-run-{os.getuid()}.2"
    assert stat.S_IMODE(taken.stat().st_mode) == mode


def test_a_folder_of_another_user_does_not_disable_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of another container may have taken the name: the file system is world-writable."""
    (tmp_path / "grpo-run-4711").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert private_folder(tmp_path) is None, "this process is not user 4711, so no folder is its own"
    assert (tmp_path / f"grpo-run-4711.{folder_module.MAX_FOLDERS}").exists(), "the other names were tried"


def test_a_link_or_file_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    """A link to a private folder is not used either."""
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    mine = tmp_path / f"grpo-run-{os.getuid()}"
    for target in (good, tmp_path / "nowhere"):
        mine.symlink_to(target)
        found = private_folder(tmp_path)
        assert found is not None
        assert found.name == f"grpo-run-{os.getuid()}.2"
        mine.unlink()
    mine.write_bytes(b"")
    found = private_folder(tmp_path)
    assert found is not None
    assert found.name == f"grpo-run-{os.getuid()}.2"
    assert list(good.iterdir()) == []


def test_without_a_memory_backed_file_system_there_is_no_folder(tmp_path: Path) -> None:
    """Checkpoints are then written to disk directly."""
    assert private_folder(tmp_path / "missing") is None


# ---- a run and its areas ----


@dataclass
class FakeRun:
    """A run directory whose supervisors take staging areas, one after another."""

    directory: Path
    memory: Path
    held: list[LockedArea] = field(default_factory=list)

    def record(self, path: Path, earlier: Path | None) -> None:
        """Write what the launch writes into `run.json`."""
        fields = {"snapshot_directory": str(path), EARLIER: str(earlier) if earlier else None}
        (self.directory / "run.json").write_text(json.dumps(fields))

    def launch(self) -> Path:
        """Begin a supervisor; return its staging area."""
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / "run.json"
        run = json.loads(file.read_text()) if file.exists() else {}
        owner = describe_owner("night", self.directory)
        found = find_area(recorded_areas(run), owner)
        folder = private_folder(self.memory)
        assert folder is not None
        self.held.append(take_area(folder, found, owner, self.record))
        return self.held[-1].path

    def die(self) -> None:
        """End the supervisor as SIGKILL does: the kernel closes its descriptors."""
        while self.held:
            os.close(self.held.pop().lock)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder in place of /dev/shm."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def run(tmp_path: Path, memory: Path) -> Iterator[FakeRun]:
    """A run that has not begun."""
    made = FakeRun(tmp_path / "runs" / "night", memory)
    yield made
    made.die()


def test_the_next_supervisor_finds_the_snapshots_under_another_name(run: FakeRun) -> None:
    """The name is random and of one supervisor only."""
    first = run.launch()
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in first.iterdir()} == {0o600}
    (first / "snapshot").write_text("weights")
    run.die()
    second = run.launch()
    assert second != first
    assert not first.exists()
    assert (second / "snapshot").read_text() == "weights"


def test_the_name_tells_nothing_of_path_or_command(run: FakeRun, tmp_path: Path, memory: Path) -> None:
    """Two containers with equal paths and commands get different names."""
    other = FakeRun(run.directory, memory)
    mine = run.launch()
    (run.directory / "run.json").rename(
        tmp_path / "mine.json"
    )  # the other container has an empty directory there
    theirs = other.launch()
    assert theirs != mine
    assert mine.exists()
    other.die()


def test_a_supervisor_killed_before_the_rename_loses_nothing(run: FakeRun) -> None:
    """`run.json` names both places."""
    first = run.launch()
    (first / "snapshot").write_text("weights")
    run.die()
    run.record(first.with_name("0" * 16), first)
    again = run.launch()
    assert (again / "snapshot").read_text() == "weights"


def test_a_copy_of_a_run_directory_does_not_take_the_original_s_snapshots(
    run: FakeRun, tmp_path: Path, memory: Path
) -> None:
    """Whether the original is running or stopped."""
    for alive in (True, False):
        area = run.launch()
        if not alive:
            run.die()
        copy = FakeRun(tmp_path / f"copy-{alive}", memory)
        shutil.copytree(run.directory, copy.directory)
        assert copy.launch() != area
        assert area.exists()
        copy.die()
        run.die()


def test_a_moved_run_directory_keeps_its_snapshots(run: FakeRun, tmp_path: Path, memory: Path) -> None:
    """Nothing else needs them."""
    (run.launch() / "snapshot").write_text("weights")
    run.die()
    moved = FakeRun(tmp_path / "moved", memory)
    run.directory.rename(moved.directory)
    assert (moved.launch() / "snapshot").exists()
    moved.die()


def test_snapshots_older_than_the_run_are_freed(run: FakeRun) -> None:
    """The run went on elsewhere, and its directory came back with other names in `run.json`."""
    old = run.launch()
    run.die()
    run.record(old.with_name("f" * 16), None)
    assert run.launch().exists()
    assert not old.exists()


# ---- locks ----


def test_a_lock_is_exclusive_and_ends_with_the_area(tmp_path: Path) -> None:
    """Whoever waits for the lock of an area that is removed does not get it."""
    held = lock_area(tmp_path)
    assert held is not None
    assert lock_area(tmp_path) is None
    os.close(held)
    again = lock_area(tmp_path)
    assert again is not None
    os.close(again)
    assert lock_area(tmp_path / "missing") is None


# ---- mount namespaces ----


def test_another_mount_namespace_is_another_view(tmp_path: Path) -> None:
    """As another container has; a child without one of its own has the same view."""
    program = [
        sys.executable,
        "-c",
        "from grpo_run.runtime.snapshots.ownership import mount_namespace; print(mount_namespace())",
    ]
    mine = mount_namespace()
    assert mine is not None
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip() == mine
    unshared = subprocess.run(["unshare", "-m", *program], capture_output=True, text=True)
    if unshared.returncode:
        pytest.skip(f"mount namespaces cannot be created: {unshared.stderr.strip()}")
    assert unshared.stdout.strip() not in (mine, "None")
