"""Termination with the parent process, with a fake C library, because this process has to continue."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest

from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.starting import PR_SET_PDEATHSIG, die_with_parent


class Exited(Exception):
    """Raised instead of calling `os._exit`."""


class Library:
    """Records the calls of `prctl`."""

    def __init__(self, result: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.result = result

    def prctl(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.result


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A C library that accepts every request; exiting the process raises."""
    made = Library(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: made)

    def end(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", end)
    return made


def test_the_signal_is_sigkill(library: Library) -> None:
    """A rank cannot block or handle it."""
    die_with_parent(os.getppid())
    assert library.calls == [(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)]


def test_the_process_exits_if_the_parent_has_exited_already(library: Library) -> None:
    """The parent exited before the request took effect; the kernel would send no signal."""
    with pytest.raises(Exited, match="137"):
        die_with_parent(os.getppid() + 1)


def test_a_rank_exits_if_the_supervisor_has_adopted_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forkserver exited before the rank knew it. The rank would stay beside those of the next attempt."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getppid()))
    for call in ("setsid", "chdir"):
        monkeypatch.setattr(os, call, lambda *_: pytest.fail("the rank starts"))
    with pytest.raises(Exited, match="137"):
        forkserver._run_child("posix:getpid", {}, "/", None)


def test_a_refused_request_raises(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an orphan could hold devices unnoticed."""
    library.result = -1
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
    with pytest.raises(OSError, match="PR_SET_PDEATHSIG"):
        die_with_parent(os.getppid())
