"""Terminate processes that are no children: SIGTERM, a bounded wait, SIGKILL.

A process is signaled through a descriptor (pidfd) after its start time was compared, so that another process
with its pid is never hit. Services that exit by themselves, such as the resource tracker, which removes
shared memory first, get more time, and no SIGTERM. Used by `helpers.py` and the guardian. Does not choose the
processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from grpo_run.runtime.processes.identity import send_signals
from grpo_run.watchdog.processes import ProcessStat, read_arguments
from grpo_run.watchdog.run_processes.keeping import is_fork_of_rank
from grpo_run.watchdog.run_processes.remaining import runs_service

TERM_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
FORK_TERM_SECONDS = 1.0
"""The same for forks of a rank, such as data loader workers: what they do ends with the rank, and they may
have inherited a handler of SIGTERM.
"""
KILL_SECONDS = 10.0
"""How long a process may take to exit after SIGKILL."""
LOOK_SECONDS = 0.1
"""Time between two looks for processes that were started meanwhile."""
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Parts of command lines of services that remove shared memory when the last process that used it has exited.
"""
CLEAN_SECONDS = 5.0
"""How long they may take for it."""
MAX_NAMED = 5
MAX_COMMAND_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class TerminatedProcess:
    """One process, and how it ended: `killed` by SIGKILL; or it `remains`.

    `part_of_rank`: it is a rank, ran no program of its own, or is a service that exits with its rank.
    """

    pid: int
    name: str
    arguments: str
    part_of_rank: bool = False
    killed: bool = False
    remains: bool = False

    @property
    def command(self) -> str:
        """The beginning of its command line, or its name if that is unknown."""
        words = self.arguments or self.name
        return words if len(words) <= MAX_COMMAND_CHARACTERS else words[: MAX_COMMAND_CHARACTERS - 1] + "…"

    def __str__(self) -> str:
        return f"{self.pid} ({self.command})"


def describe(terminated: list[TerminatedProcess]) -> str:
    """Return one sentence on processes that were terminated; "" if there is nothing to say.

    What is part of a rank is not mentioned unless it remains.
    """
    gone = [one for one in terminated if not one.remains and not one.part_of_rank]
    remaining = [one for one in terminated if one.remains]
    killed = sum(one.killed for one in gone)
    sentences = []
    if gone:
        number = "1 process" if len(gone) == 1 else f"{len(gone)} processes"
        by_force = f"; {killed} needed SIGKILL" if killed else ""
        sentences.append(f"ended {number} that the ranks had started: {_names(gone)}{by_force}")
    if remaining:
        sentences.append(f"could not end {_names(remaining)}")
    return "; ".join(sentences)


def _names(processes: list[TerminatedProcess]) -> str:
    named = [str(one) for one in processes[:MAX_NAMED]]
    further = [f"{len(processes) - MAX_NAMED} more"] if len(processes) > MAX_NAMED else []
    return ", ".join(named + further)


def terminate(
    find: Callable[[], Mapping[int, ProcessStat]],
    *,
    sessions: Collection[int],
    term_seconds: float = TERM_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> list[TerminatedProcess]:
    """Terminate processes and whatever they start meanwhile, and wait until all have exited.

    Args:
        find: returns the processes that are left, by pid. Called several times.
        sessions: those of the ranks.
        term_seconds: time between SIGTERM and SIGKILL.
        clock: monotonic seconds.

    Returns:
        the processes that were signaled; those that have not exited are marked. Services that exited by
        themselves are not in it.

    Raises:
        OSError: no descriptor is left.
    """
    began = clock()
    seen: dict[tuple[int, int], TerminatedProcess] = {}
    command_lines: dict[tuple[int, int], str] = {}  # of one that is exiting, it cannot be read any more
    refused: set[tuple[int, int]] = set()
    while True:
        left = {pid: one for pid, one in find().items() if one.key not in refused}
        elapsed = clock() - began
        if not left or elapsed >= term_seconds + KILL_SECONDS:
            break
        for process in left.values():
            sent = seen.get(process.key)
            arguments = command_lines.get(process.key) or read_arguments(process.pid)
            command_lines[process.key] = arguments
            is_fork = process.session in sessions and is_fork_of_rank(arguments)
            cleans = any(mark in arguments for mark in CLEANERS)
            grace = min(term_seconds, FORK_TERM_SECONDS) if is_fork else term_seconds
            if cleans:
                grace += CLEAN_SECONDS  # the last process that it waits for may just have been killed
            number = signal.SIGKILL if elapsed >= grace else signal.SIGTERM
            if sent is not None and (sent.killed or number == signal.SIGTERM):
                continue
            if number == signal.SIGTERM and cleans:
                continue
            if not send(process, number):
                refused.add(process.key)
            seen[process.key] = TerminatedProcess(
                pid=process.pid,
                name=process.name,
                arguments=arguments,
                part_of_rank=is_fork or runs_service(arguments) or process.pid in sessions,
                killed=number == signal.SIGKILL,
            )
        wait_for_exits(left, LOOK_SECONDS)
    remaining = {process.key for process in left.values()} | refused
    return [replace(one, remains=key in remaining) for key, one in seen.items()]


def send(process: ProcessStat, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; SIGCONT follows SIGTERM, as a stopped process handles no signal.

    Returns:
        False if it may not be signaled. True also if it has exited.

    Raises:
        OSError: no descriptor is left.
    """
    numbers = (number, signal.SIGCONT) if number == signal.SIGTERM else (number,)
    try:
        send_signals(process.pid, process.started_ticks, *numbers)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def wait_for_exits(pids: Iterable[int], seconds: float) -> None:
    """Wait until all these processes have exited, at most `seconds`. Does not reap them.

    Raises:
        OSError: no descriptor is left.
    """
    poller = select.poll()
    running = 0
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as opened:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                poller.register(descriptor, select.POLLIN)
                running += 1
        while running and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left * 1000):
                poller.unregister(descriptor)
                running -= 1
