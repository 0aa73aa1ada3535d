"""One worker and its keeper, seen from the rank: its connections, its resource usage, why it is replaced, and its end.

Used by `pool.py`, which gives it calls and decides when one has taken too long. The keeper, not the rank, kills it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import time

from grpo_run.runtime.continuity.rewards import FailureKind
from grpo_run.runtime.detection.families import usage
from grpo_run.trainers.rewards.workers.host import Host
from grpo_run.trainers.rewards.workers.messages import (
    Failure,
    FrameReader,
    Reply,
    send_frame,
    send_frame_until,
)
from grpo_run.trainers.rewards.workers.worker import HEARTBEAT, own_memory_bytes
from grpo_run.watchdog.diagnosis.exits import signal_name
from grpo_run.watchdog.host_memory.reading import groups_of
from grpo_run.watchdog.stalls.process_clocks import FamilyReading, ThreadReading

END_SECONDS = 15.0
"""How long a worker may take to end after it was killed; longer than its keeper waits."""
START_SECONDS = 60.0
RECYCLE_BYTES = 1024**3
"""A worker that keeps this much more memory after a call than after its first one is replaced."""
RECYCLE_PROCESSES = 8
"""A worker that has left more processes than this is replaced, which ends them."""
SOCKET_BYTES = 4 * 1024**2
"""Buffer of a connection, so that a batch is sent without waiting for its reader; the kernel may grant less."""


class WorkerHandle:
    """One worker and its keeper, seen from the rank."""

    def __init__(self, host: Host) -> None:
        control, their_control = socket.socketpair()
        tasks, their_tasks = socket.socketpair()
        self._control, self._tasks = control, tasks
        for end in (tasks, their_tasks):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        memory = os.memfd_create("grpo-run-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(memory, HEARTBEAT.size)
        self._heartbeat = mmap.mmap(memory, HEARTBEAT.size)
        try:
            host.start_worker(their_control, their_tasks, memory)
        except OSError:
            control.close()
            tasks.close()
            raise
        finally:
            os.close(memory)
            their_control.close()
            their_tasks.close()
        control.setblocking(False)
        tasks.setblocking(False)
        self.functions: set[int] = set()
        self._events: list[dict[str, int | str]] = []
        self._frames = FrameReader(tasks)
        self._reports = FrameReader(control)
        self._closed = False
        self._base_bytes: int | None = None
        self._poll = select.poll()
        self._poll.register(tasks, select.POLLIN)
        self._poll.register(control, select.POLLIN)
        self.pid = self._await_start()
        self._cgroup = next(iter(groups_of(self.pid)), None)
        self._kills: int | None = None

    def send(self, content: bytes, deadline: float) -> None:
        """Send a frame.

        Args:
            content: of the frame.
            deadline: until when it may take, in monotonic seconds.
        """
        self._kills = self._count_kills()
        send_frame_until(self._tasks, content, deadline)

    def receive(self, seconds: float) -> bytes | None:
        """Return a frame that is complete within some time, or None.

        Raises:
            ConnectionError: the worker has ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            ready = self._poll.poll(max(0.0, left) * 1000)
            if not ready:
                return None
            if any(descriptor == self._tasks.fileno() for descriptor, _ in ready):
                frame = self._frames.read()
                if frame is not None:
                    return frame
            else:
                self._read_reports()
                if self._event("exited") is not None or self._event("closed") is not None:
                    raise ConnectionError("the worker has exited")

    def memory_bytes(self) -> int:
        """Return the memory that the worker itself holds."""
        return own_memory_bytes(self.pid)

    def read_family(self) -> FamilyReading | None:
        """Return what the worker's processes have used. It leads a session, as a rank does."""
        members = usage.find_families([self.pid])[self.pid]
        used = usage.read_family(members)
        threads = usage.read_threads(members)
        if used is None or threads is None:
            return None
        return FamilyReading(
            members=used.members,
            cpu_seconds=used.cpu_seconds,
            io_bytes=used.io_bytes,
            runnable=frozenset(number for number, thread in threads.items() if thread.state == "R"),
            connected=_is_connected(members, self._tasks),
        )

    def read_threads(self) -> dict[int, ThreadReading] | None:
        """Return the threads of the worker itself, or None."""
        threads = usage.read_threads([self.pid])
        if threads is None:
            return None
        return {number: ThreadReading(one.state, one.cpu_seconds) for number, one in threads.items()}

    def heartbeat_age(self, now: float) -> float:
        """Return for how long no thread of the worker's interpreter has run; 0 before it has begun."""
        (stamp,) = HEARTBEAT.unpack_from(self._heartbeat)
        return now - stamp / 1e9 if stamp else 0.0

    def why_replace(self, reply: Reply) -> str | None:
        """Return why this worker should not run another call; None if it may."""
        if reply.left_processes > RECYCLE_PROCESSES:
            return f"left {reply.left_processes} processes"
        if self._base_bytes is None:
            self._base_bytes = reply.anonymous_bytes
        kept = reply.anonymous_bytes - self._base_bytes
        return f"kept {kept / 2**30:.1f} GiB more than at first" if kept > RECYCLE_BYTES else None

    def how_it_ended(self) -> Failure:
        """Return how a worker ended by itself: for lack of memory, if the kernel has killed a process of its cgroup meanwhile."""
        with contextlib.suppress(OSError):
            self._await_event("exited", END_SECONDS)
        event = self._event("exited")
        if event is None:
            return Failure(kind=FailureKind.died, message="ended its worker process")
        status = int(event["status"])
        if not os.WIFSIGNALED(status):
            text = f"ended its worker process with exit code {os.WEXITSTATUS(status)}"
            return Failure(kind=FailureKind.died, message=text)
        text = f"ended its worker process by {signal_name(os.WTERMSIG(status))}"
        killed = (self._count_kills() or 0) - (self._kills or 0)
        if self._cgroup is None or killed <= 0 or os.WTERMSIG(status) != signal.SIGKILL:
            return Failure(kind=FailureKind.died, message=text)
        plural = "es" if killed > 1 else ""
        return Failure(
            kind=FailureKind.memory,
            message=f"{text}, while the kernel killed {killed} process{plural} of {self._cgroup.folder} for lack of memory",
        )

    def _count_kills(self) -> int | None:
        return self._cgroup.kills() if self._cgroup is not None else None

    def end(self) -> int:
        """End the worker and everything that it has started; return how many processes that was besides it.

        One in uninterruptible sleep is left to its keeper after some seconds.
        """
        if self._closed:
            return 0
        self._closed = True
        killed = 0
        with contextlib.suppress(OSError):
            self._control.setblocking(True)
            send_frame(self._control, b"end")
            self._control.setblocking(False)
        with contextlib.suppress(OSError):
            killed = int(self._await_event("gone", END_SECONDS)["killed"])
        self._control.close()
        self._tasks.close()
        return killed

    def _await_start(self) -> int:
        return int(self._await_event("started", START_SECONDS)["pid"])

    def _await_event(self, name: str, seconds: float) -> dict[str, int | str]:
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while (event := self._event(name)) is None:
            left = deadline - time.monotonic()
            if self._event("closed") is not None:
                raise ConnectionError("the keeper of a reward worker has ended")
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError(
                    f"the keeper of a reward worker did not report {name!r} in {seconds:.0f} s"
                )
            self._read_reports()
        return event

    def _read_reports(self) -> None:
        try:
            while (frame := self._reports.read()) is not None:
                self._events.append(json.loads(frame))
        except ConnectionError:
            self._events.append({"event": "closed"})

    def _event(self, name: str) -> dict[str, int | str] | None:
        return next((event for event in self._events if event["event"] == name), None)


def _is_connected(members: list[int], tasks: socket.socket) -> bool:
    """Whether a process of a worker has a socket besides its own connection to the rank, as far as that can be read."""
    for pid in members:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        found = 0
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("socket:")
        if found > 1:
            return True
    return False
