"""Looks at ranks: what each thread of a rank and of its descendants waits for, from /proc.

Called by `_wait_detector.py` while ranks are suspected. A whole look takes about 60 µs per thread and 10 µs
per process of the machine. The kernel shows system calls and memory to those who may trace a process; a
refusal is reported in `refused` and makes the process unknown. Does not judge.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Collection, Mapping

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence.stack_capture import STACK_SIGNAL
from grpo_run.watchdog.run_processes.remaining import runs_service
from grpo_run.watchdog.waits.looks import UNKNOWN, Process, RankLook, Wait, WaitingThread, WaitKind
from grpo_run.watchdog.waits.system_calls import decode_wait

MAX_THREADS = 1000
"""A process with more threads is not examined, because the supervisor would pause for too long."""

_MACHINE = platform.machine()
_NEEDED = {b"Name", b"State", b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches"}
_STATUS_FIELD = re.compile(
    rb"^(Name|State|NSpid|SigCgt|voluntary_ctxt_switches|nonvoluntary_ctxt_switches):\t?(.*)$", re.MULTILINE
)


class LookReader:
    """Reads looks. `refused` holds the first refusal of the kernel, by rank."""

    def __init__(self) -> None:
        self.refused: dict[int, str] = {}
        self._threads: dict[int, WaitingThread] = {}

    def forget(self) -> None:
        """Read every thread anew at the next look."""
        self._threads.clear()

    def main_thread_may_be_stuck(self, pid: int) -> bool:
        """Whether the main thread sleeps in a call that has no time limit or a known end. Takes about 60
        µs.
        """
        status = _read_status(f"/proc/{pid}/task/{pid}")
        if status is None:
            return False
        thread, _ = self._read_thread(pid, pid, status)
        return thread.wait.kind in (WaitKind.futex, WaitKind.child, WaitKind.sleep)

    def read(
        self, pids: Mapping[int, int], idle_threads: Mapping[int, Collection[int]]
    ) -> dict[int, RankLook]:
        """Look at several ranks, with one scan of all processes.

        Args:
            pids: process ids by rank.
            idle_threads: thread ids by rank, for `Look.idle_threads`.
        """
        children = processes.children_by_parent(processes.read_processes())
        looks = {}
        for rank, pid in pids.items():
            found: dict[int, Process] = {}
            waiting = [(pid, 0)]
            while waiting:
                member, parent = waiting.pop()
                if member not in found:
                    found[member] = self._read_process(rank, member, parent)
                    waiting.extend((child, member) for child in children.get(member, ()))
            looks[rank] = RankLook(pid=pid, processes=found, idle_threads=frozenset(idle_threads[rank]))
        return looks

    def _read_process(self, rank: int, pid: int, parent: int) -> Process:
        unreadable = Process(pid=pid, parent=parent, threads=None)
        folder = f"/proc/{pid}/task"
        try:
            tids = [int(name) for name in os.listdir(folder)]
        except OSError:
            return unreadable
        if len(tids) > MAX_THREADS:
            return unreadable
        threads = []
        caught: frozenset[int] = frozenset()
        for tid in tids:
            status = _read_status(f"{folder}/{tid}")
            if status is None:
                return unreadable
            thread, refusal = self._read_thread(pid, tid, status)
            if refusal:
                self.refused.setdefault(rank, refusal)
            threads.append(thread)
            if tid == pid:
                caught = _signals(status.get(b"SigCgt", b"")) - {int(STACK_SIGNAL)}
                if len(status.get(b"NSpid", b"").split()) > 1:
                    return unreadable  # in a namespace of its own, ids and clocks may mean something else
        timers = processes.read_file(f"/proc/{pid}/timers")
        if timers is None and os.path.exists(folder):
            self.refused.setdefault(rank, "this kernel does not show the timers of processes")
        return Process(
            pid=pid,
            parent=parent,
            threads=tuple(threads),
            caught_signals=caught,
            has_timers=timers is None or bool(timers),
            helper=parent != 0 and runs_service(processes.read_arguments(pid)),
        )

    def _read_thread(
        self, pid: int, tid: int, status: Mapping[bytes, bytes]
    ) -> tuple[WaitingThread, str | None]:
        """Return one thread, and the kernel's refusal to show its system call.

        A thread that sleeps and has not been scheduled since the last look is in the same call still.
        """
        state = status[b"State"][:1].decode()
        switches = int(status[b"voluntary_ctxt_switches"]) + int(status[b"nonvoluntary_ctxt_switches"])
        name = status[b"Name"].decode(errors="replace")
        before = self._threads.get(tid)
        if (
            before is not None
            and state == "S"
            and (before.state, before.switches, before.name) == (state, switches, name)
        ):
            return before, None
        wait, registers, refusal = UNKNOWN, "", None
        if state in "ZX":
            wait = Wait(kind=WaitKind.ended)
        elif state == "T":
            wait = Wait(kind=WaitKind.stopped)
        elif state == "S":
            registers, refusal = read_system_call(pid, tid)
            wait = decode_wait(registers, _MACHINE, functools.partial(read_memory, tid))
        thread = WaitingThread(
            tid=tid, name=name, state=state, switches=switches, wait=wait, registers=registers
        )
        if not refusal:
            self._threads[tid] = thread
        return thread, refusal


def _read_status(folder: str) -> dict[bytes, bytes] | None:
    content = processes.read_file(f"{folder}/status")
    if content is None:
        return None
    fields = dict(_STATUS_FIELD.findall(content))
    return fields if fields.keys() >= _NEEDED else None


def read_system_call(pid: int, tid: int) -> tuple[str, str | None]:
    """Return the system call that a thread is in, and the kernel's refusal to show it."""
    path = f"/proc/{pid}/task/{tid}/syscall"
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(400).decode().strip(), None
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists(f"/proc/{pid}/task/{tid}/status"):
            return "", "this kernel does not show the system calls of threads"
        return "", None  # the thread has exited
    except OSError as error:
        return "", f"the system calls of its threads may not be read ({error.strerror})"


def read_memory(tid: int, address: int, size_bytes: int) -> bytes | None:
    """Read memory of a thread's process; None if that is refused or nothing is mapped there."""
    try:
        with open(f"/proc/{tid}/mem", "rb", buffering=0) as file:
            content = os.pread(file.fileno(), size_bytes, address)
    except (OSError, OverflowError):
        return None
    return content if len(content) == size_bytes else None


def _signals(mask: bytes) -> frozenset[int]:
    bits = int(mask or b"0", 16)
    return frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1)
