"""The registry of run directories, and the runs that are found by it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from grpo_run.runtime import registry
from grpo_run.runtime.catalog import run_directories
from grpo_run.runtime.registry import (
    announce_target,
    forget,
    register,
    registered,
    registry_folder,
    target_file,
    targets_folder,
    withdraw_target,
)


def test_the_run_launched_last_comes_first(tmp_path: Path) -> None:
    """A second launch moves its entry; nobody else can read the registry."""
    folder = tmp_path / "state" / "runs"
    for name in ("a", "b\n\udcff", "a"):
        assert register(tmp_path / name, folder)
        for entry in folder.iterdir():  # file systems may keep times of milliseconds only
            os.utime(entry, ns=(entry.stat().st_atime_ns, entry.stat().st_mtime_ns - 10**9))
    assert registered(folder) == [tmp_path / "a", tmp_path / "b\n\udcff"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    forget(tmp_path / "a", folder)
    assert registered(folder) == [tmp_path / "b\n\udcff"]


def test_the_oldest_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry does not grow without end."""
    monkeypatch.setattr(registry, "MAX_ENTRIES", 2)
    for number in range(4):
        register(tmp_path / str(number), tmp_path / "state")
        for entry in (tmp_path / "state").iterdir():
            os.utime(entry, ns=(entry.stat().st_atime_ns, entry.stat().st_mtime_ns - 10**9))
    assert registered(tmp_path / "state") == [tmp_path / "3", tmp_path / "2"]
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_what_is_no_entry_is_ignored(tmp_path: Path) -> None:
    """Somebody's own file, and a path under a name that does not follow from it."""
    (tmp_path / "notes").write_text("/etc")
    (tmp_path / "0123456789abcdef").write_bytes(b"relative\0")
    assert registered(tmp_path) == []
    assert registered(None) == registered(tmp_path / "missing") == []


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    """Training does not depend on the registry."""
    (tmp_path / "file").touch()
    assert not register(tmp_path, tmp_path / "file" / "runs")
    assert not register(tmp_path, None)


def test_a_relative_state_directory_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the specification of XDG_STATE_HOME says."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry_folder() == tmp_path / ".local" / "state" / "grpo-run" / "runs"


def test_prometheus_is_told_the_address_of_a_run(tmp_path: Path) -> None:
    """In a file that other users can read, whatever the umask is; the next launch may have another port."""
    folder = tmp_path / "state" / "targets"
    before = os.umask(0o077)
    try:
        for port in (9460, 9461):
            assert announce_target(tmp_path / "night", folder, target=f"127.0.0.1:{port}", run_id="night")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    (group,) = json.loads(file.read_text())
    assert group == {
        "targets": ["127.0.0.1:9461"],
        "labels": {"run_id": "night", "node": os.uname().nodename},
    }
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)) == (0o644, 0o755)
    withdraw_target(tmp_path / "night", folder)
    assert not file.exists()
    withdraw_target(tmp_path / "night", folder)


def test_a_port_that_was_taken_over_is_announced_once(tmp_path: Path) -> None:
    """The launch that had it was killed; other addresses, other nodes and other files stay."""
    for name, port in (("killed", 9460), ("other", 9461)):
        announce_target(tmp_path / name, tmp_path, target=f"127.0.0.1:{port}", run_id=name)
    elsewhere = [{"targets": ["127.0.0.1:9460"], "labels": {"run_id": "far", "node": "another"}}]
    (tmp_path / "far.json").write_text(json.dumps(elsewhere))
    (tmp_path / "mine.json").write_text("{")
    announce_target(tmp_path / "night", tmp_path, target="127.0.0.1:9460", run_id="night")
    wanted = {target_file(tmp_path / name, tmp_path).name for name in ("night", "other")}
    assert {file.name for file in tmp_path.glob("*.json")} == wanted | {"far.json", "mine.json"}


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    """A run is trained also where Prometheus does not find it by itself."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "targets", None):
        assert not announce_target(tmp_path, folder, target="127.0.0.1:1", run_id="x")
        withdraw_target(tmp_path, folder)


def test_targets_are_beside_the_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`grpo-run dashboards export` mounts this folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert targets_folder() == tmp_path / "grpo-run" / "targets"


def test_every_run_that_exists_is_found_once(tmp_path: Path) -> None:
    """In the folder of runs and in the registry; a run in both, and one that is gone, are no obstacle."""
    folder = tmp_path / "state"
    here, elsewhere = tmp_path / "runs" / "night", tmp_path / "elsewhere" / "evening"
    for path in (here, elsewhere):
        path.mkdir(parents=True)
        (path / "run.json").write_text("{}")
    for path in (elsewhere, here, tmp_path / "gone"):
        register(path, folder)
    assert run_directories(tmp_path / "runs", folder) == [here, elsewhere]
