"""A process that dies with its parent, with a stand-in for the C library: this one is to go on."""

from __future__ import annotations

import ctypes
import errno
import os
import signal

import pytest

from grpo_run.runtime.processes.parent_death import PR_SET_PDEATHSIG, die_with_parent


class Ended(Exception):
    """Instead of `os._exit`."""


class Library:
    """Takes the call down."""

    def __init__(self, result: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._result = result

    def prctl(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self._result


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A C library that grants everything; leaving the process raises."""
    made = Library(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: made)

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    return made


def test_the_kernel_is_asked_for_sigkill(library: Library) -> None:
    """Nothing a rank does can hold that up."""
    die_with_parent(os.getppid())
    assert library.calls == [(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)]


def test_a_parent_that_is_gone_already_ends_the_process(library: Library) -> None:
    """It died before the request took effect; no signal would come."""
    with pytest.raises(Ended, match="137"):
        die_with_parent(os.getppid() + 1)


def test_a_refusal_is_not_passed_over(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orphan that nobody knows of would hold the devices."""
    library._result = -1
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
    with pytest.raises(OSError, match="PR_SET_PDEATHSIG"):
        die_with_parent(os.getppid())
