"""Adoption: orphans of the supervisor's descendants become its children, and are reaped when they exit.

A process whose parent exits is handed to the nearest ancestor that has asked for it (PR_SET_CHILD_SUBREAPER,
prctl(2)), else to init. With it, what a rank has started remains a descendant of the supervisor: also in a
session of its own, and after a double fork. Each adopted child is waited for by its pid: waiting for any
child would take the exit codes of others. Children that the supervisor has started itself are told from them,
also those that it has abandoned. Called by `helpers.py`. Terminates nothing else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from grpo_run.runtime.processes.starting import become_subreaper
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.processes import read_children, read_stat

REAP_SECONDS = 1.0
"""Time between two looks for children that have exited. While none has, a look is one system call."""
UNCLAIMED_SECONDS = 60.0
"""After this time nobody waits for a child of our own session that has exited."""
_abandoned: set[tuple[int, int]] = set()
"""Children that this process has killed and no longer waits for, by pid and start time."""
_companions: set[tuple[int, int]] = set()
"""Those that live beside the ranks; a zombie too, whose exit code is read by who has started it."""


def adopt_orphans() -> bool:
    """Become the parent of all future orphans among this process's descendants.

    Call it before the first rank is started.

    Returns:
        whether every child that this process does not start itself will be a descendant of one that it does.
        Not so if the kernel refuses, for pid 1 of a container, which adopts everything, and with children
        from before.
    """
    return become_subreaper() and os.getpid() != 1 and not read_children(os.getpid())


def note_companion(pid: int) -> None:
    """Take note of a child that lives beside the ranks and leads a session of its own (`companion.py`)."""
    stat = read_stat(pid)
    if stat is not None:
        _companions.add(stat.key)


def own_children() -> set[int]:
    """Return the pids of the forkserver, of drain workers and of companions, abandoned ones too, which have
    sessions of their own.
    """
    # ranks are not daemons
    started = {child.pid for child in multiprocessing.active_children() if child.daemon}
    abandoned = {pid for pid, ticks in _abandoned if _lives(pid, ticks)}
    companions = {pid for pid, ticks in _companions if (stat := read_stat(pid)) and stat.key == (pid, ticks)}
    return (
        abandoned
        | companions
        | {pid for pid in (process_names.forkserver_pid(), *started) if pid is not None}
    )


def abandon(child: BaseProcess) -> None:
    """Kill a child, and never wait for it: on a disk that hangs, it exits long after SIGKILL, or never.

    It descends from this process and has the run's token, as the helpers of ranks do. It is not taken for
    one: the end of an attempt and of the run would wait for it.
    """
    assert child.pid is not None
    _never_wait_for(child.pid)
    child.kill()
    process_names.forget_child(child)


def abandon_server() -> None:
    """Do the same with the forkserver. The next rank is forked from another one."""
    server = process_names.forkserver_pid()
    assert server is not None
    _never_wait_for(server)
    os.kill(server, signal.SIGKILL)
    process_names.forget_server()


def _never_wait_for(pid: int) -> None:
    stat = read_stat(pid)
    if stat is not None:
        _abandoned.add(stat.key)


def _lives(pid: int, started_ticks: int) -> bool:
    """Whether a process has not exited. A zombie has, and is reaped as an adopted one."""
    stat = read_stat(pid)
    return stat is not None and stat.started_ticks == started_ticks and stat.is_alive


class Reaper:
    """Reaps the children that this process has adopted.

    Args:
        started: returns the pids of children that have sessions of their own and are waited for by others.
        clock: monotonic seconds.
    """

    def __init__(
        self, started: Callable[[], set[int]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._started = started
        self._clock = clock
        self._session = os.getsid(0)
        self._next_at = 0.0
        self._exited_since: dict[tuple[int, int], float] = {}

    def reap(self, *, now: bool = False) -> None:
        """Reap adopted children that have exited.

        Args:
            now: also if the last look was a moment ago.
        """
        moment = self._clock()
        if moment < self._next_at and not now:
            return
        self._next_at = moment + REAP_SECONDS
        if not _any_child_has_exited():
            self._exited_since.clear()
            return
        started = self._started()
        stats = [read_stat(pid) for pid in read_children(os.getpid()) if pid not in started]
        exited = [stat for stat in stats if stat is not None and stat.state == "Z"]
        self._exited_since = {stat.key: self._exited_since.get(stat.key, moment) for stat in exited}
        for stat in exited:
            unclaimed = moment - self._exited_since[stat.key] >= UNCLAIMED_SECONDS
            if stat.session != self._session or unclaimed:
                with contextlib.suppress(ChildProcessError):  # waited for meanwhile, by another thread
                    os.waitpid(stat.pid, os.WNOHANG)


def _any_child_has_exited() -> bool:
    """Whether any child waits to be reaped, which stays so."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # there is no child at all
