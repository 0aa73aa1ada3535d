"""The registry of run directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from grpo_run.runtime import registry
from grpo_run.runtime.registry import forget, register, registered, registry_folder


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
