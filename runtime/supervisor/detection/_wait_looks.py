"""Looks at ranks: what each thread of a rank and of its descendants waits for, from /proc.

Called by `_wait_detector.py` while ranks are suspected. A whole look takes about 60 µs per thread and 10 µs
per process of the machine. The kernel shows system calls and memory to those who may trace a process; a
refusal is reported in `refused` and makes the process unknown. Does not judge.

`read_channels` adds who holds the pipes and unix sockets that threads wait for. Holders come from
/proc/PID/fd of every process, about 2 µs per open descriptor of the machine, so it is asked only for a rank
that would be stuck if nobody else had them open. A device, a network connection, an event descriptor or a
named pipe leads elsewhere, and so does everything that cannot be identified. A socket's timeout
(`SO_RCVTIMEO`), which no system call shows, is read from a copy of the descriptor; that requires the right to
trace the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Mapping

from grpo_run.watchdog.evidence.stack_capture import STACK_SIGNAL
from grpo_run.watchdog.processes import list_processes, read_file, read_stat, unix_peers
from grpo_run.watchdog.run_processes import process_tree
from grpo_run.watchdog.run_processes.remaining import runs_service
from grpo_run.watchdog.waits.looks import UNKNOWN, Channels, Process, RankLook, Wait, WaitingThread, WaitKind
from grpo_run.watchdog.waits.proof import threads_on_descriptors
from grpo_run.watchdog.waits.system_calls import decode_wait, parse_system_call

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
        return thread.wait.kind in (WaitKind.futex, WaitKind.descriptors, WaitKind.child, WaitKind.sleep)

    def read(
        self, pids: Mapping[int, int], idle_threads: Mapping[int, Collection[int]]
    ) -> dict[int, RankLook]:
        """Look at several ranks, with one scan of all processes.

        Args:
            pids: process ids by rank.
            idle_threads: thread ids by rank, for `Look.idle_threads`.
        """
        children = process_tree.children_by_parent(process_tree.read_processes())
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
        own_ids = True
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
                own_ids = len(status.get(b"NSpid", b"").split()) == 1
        timers = read_file(f"/proc/{pid}/timers")
        if timers is None and os.path.exists(folder):
            self.refused.setdefault(rank, "this kernel does not show the timers of processes")
        return Process(
            pid=pid,
            parent=parent,
            threads=tuple(threads),
            caught_signals=caught,
            has_timers=timers is None or bool(timers),
            own_ids=own_ids,
            helper=parent != 0 and runs_service(process_tree.read_arguments(pid)),
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
        if before is not None and (before.state, before.switches, before.name) == ("S", switches, name) == (
            state,
            switches,
            name,
        ):
            return before, None
        wait, registers, refusal = UNKNOWN, "", None
        if state in "ZX":
            wait = Wait(kind=WaitKind.ended)
        elif state == "T":
            wait = Wait(kind=WaitKind.stopped)
        elif state == "S":
            registers, refusal = read_system_call(pid, tid)
            call = parse_system_call(registers, _MACHINE)
            if call is not None:
                wait = decode_wait(call, lambda address, size: read_memory(tid, address, size))
            if wait.kind is WaitKind.sleep and not _shares_clock(pid):
                wait = UNKNOWN
        thread = WaitingThread(
            tid=tid, name=name, state=state, switches=switches, wait=wait, registers=registers
        )
        if not refusal:
            self._threads[tid] = thread
        return thread, refusal


def _read_status(folder: str) -> dict[bytes, bytes] | None:
    content = read_file(f"{folder}/status")
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


def _shares_clock(pid: int) -> bool:
    """Whether the process's monotonic clock is this one's; a time namespace may shift it."""
    return _time_namespace(str(pid)) == _time_namespace("self")


def _time_namespace(process: str) -> str | None:
    try:
        return os.readlink(f"/proc/{process}/ns/time")
    except FileNotFoundError:
        return None  # a kernel without time namespaces
    except OSError:
        return f"unknown for {process}"


def _signals(mask: bytes) -> frozenset[int]:
    bits = int(mask or b"0", 16)
    return frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1)


_PIDFD_GETFD = 438  # the same number on all machines
_TIMEVAL = struct.Struct("=qq")
_libc = ctypes.CDLL(None, use_errno=True)


def has_time_limit(pid: int, descriptor: int) -> bool | None:
    """Whether receiving from or sending to a process's socket has a time limit; None if that is refused."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copy < 0:
        return None
    with socket.socket(fileno=copy) as opened:
        try:
            limits = [
                opened.getsockopt(socket.SOL_SOCKET, option, _TIMEVAL.size)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
            ]
        except OSError:
            return None
    return any(any(_TIMEVAL.unpack(limit)) for limit in limits)


_PIPE_ENDS = {stat.S_IRUSR: "read", stat.S_IWUSR: "write"}
_POLLING = frozenset({"poll", "ppoll", "select", "pselect6"})


def read_channels(look: RankLook) -> Channels:
    """Return the holders of what the rank's threads wait for."""
    wanted: dict[int, frozenset[str]] = {}
    pairs: dict[int, int] | None = None
    for pid, threads in threads_on_descriptors(look).items():
        for thread in threads:
            links = _links(pid, thread)
            if links and any(link.startswith("socket:") for link in links):
                pairs = _connected_pairs() if pairs is None else pairs
            ends = _both_ends(links, pairs or {}) if links else None
            if ends:
                wanted[thread.tid] = ends
    if not wanted:
        return Channels()
    holding = _holders(frozenset().union(*wanted.values()), look)
    if holding is None:
        return Channels()
    found = frozenset().union(*holding.values())
    # a thread waits only while both ends exist: an end that nobody holds is on its way through a unix socket
    return Channels(
        holders={
            tid: frozenset(pid for pid, held in holding.items() if held & ends)
            for tid, ends in wanted.items()
            if ends <= found
        }
    )


def _links(pid: int, thread: WaitingThread) -> list[str] | None:
    """What the thread's descriptors are; None if any of them cannot be told."""
    folder = f"/proc/{pid}/task/{thread.tid}"
    if thread.wait.through_epoll:
        return _members_of_epoll(folder, thread.wait.descriptors[0])
    links = [_read_link(f"{folder}/fd/{descriptor}") for descriptor in thread.wait.descriptors]
    # a time limit in the kernel ends a transfer, but not a poll
    on_socket = any(link is not None and link.startswith("socket:") for link in links)
    polls = thread.wait.call in _POLLING
    if on_socket and not polls and has_time_limit(pid, thread.wait.descriptors[0]) is not False:
        return None
    return None if None in links else [link for link in links if link is not None]


def _members_of_epoll(folder: str, descriptor: int) -> list[str] | None:
    """What an epoll instance watches.

    It keeps watching a descriptor that was closed while a copy was open: the inode then differs.
    """
    content = read_file(f"{folder}/fdinfo/{descriptor}")
    if content is None:
        return None
    links = []
    for line in content.splitlines():
        if not line.startswith(b"tfd:"):
            continue
        words = line.split()
        inode = next((word[4:] for word in words if word.startswith(b"ino:")), None)
        link = _read_link(f"{folder}/fd/{int(words[1])}")
        if inode is None or link is None or not link.endswith(f":[{int(inode, 16)}]"):
            return None
        links.append(link)
    return links


def _connected_pairs() -> dict[int, int]:
    """The peer of each unix socket to which only its peer can send; none if the kernel does not say."""
    try:
        return unix_peers({socket.SOCK_STREAM, socket.SOCK_SEQPACKET})
    except OSError:
        return {}


def _both_ends(links: Iterable[str], pairs: Mapping[int, int]) -> frozenset[str] | None:
    """The ends whose holders can end the wait; None if any descriptor is neither a pipe nor a connected pair.

    A socket's end is its inode. Both ends of a pipe have one inode, and differ in what they permit.
    """
    ends: set[str] = set()
    for link in links:
        kind, _, inode = link.rstrip("]").partition(":[")
        if kind == "socket":
            peer = pairs.get(int(inode))
            if not peer or pairs.get(peer) != int(inode):
                return None
            ends |= {link, f"socket:[{peer}]"}
        elif kind == "pipe":
            ends |= {f"{link} {access}" for access in _PIPE_ENDS.values()}
        else:
            return None
    return frozenset(ends)


def _holders(ends: frozenset[str], look: RankLook) -> dict[int, frozenset[str]] | None:
    """Which processes hold which of these ends; None if a process that may hold one cannot be read."""
    rank = read_stat(look.pid)
    if rank is None:
        return None
    holding = {}
    for pid in list_processes():
        held = _held(pid, ends)
        if held is None:
            process = read_stat(pid)
            if process is None or process.kernel_thread:
                continue
            # a process that is older than the rank inherited nothing from it
            if pid in look.processes or process.started_ticks >= rank.started_ticks:
                return None
        elif held:
            holding[pid] = held
    return holding


def _held(pid: int, ends: frozenset[str]) -> frozenset[str] | None:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    held: set[str] = set()
    for name in names:
        link = _read_link(f"{folder}/{name}")
        if link is not None and link.startswith("pipe:"):
            held |= {f"{link} {access}" for access in _accesses(f"{folder}/{name}")} & ends
        elif link in ends:
            held.add(link)
    return frozenset(held)


def _accesses(path: str) -> list[str]:
    """What an open descriptor permits: the permissions of its link in /proc say so."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return []
    return [access for bit, access in _PIPE_ENDS.items() if mode & bit]


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
