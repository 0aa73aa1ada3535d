"""The identity of a process beyond its pid, which another process may have later, in another container or on
another machine.

A supervisor writes its identity into the run directory; commands and the next supervisor read it. No process
is signaled before its identity is verified. Imports `watchdog.processes` only.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.files import BOOT_ID
from grpo_run.watchdog.processes import read_stat

PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """One process.

    Attributes:
        pid: valid in its namespace only.
        started_ticks: of the process, since the machine has started; see proc(5).
        namespace: of pids, after the id of the machine's boot; empty if not known.
        host: name of the machine, for messages.
    """

    pid: int
    started_ticks: int
    namespace: str
    host: str = ""

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it runs under this kernel, also in another container. True if that is not known."""
        own = own_namespace()
        return not (self.namespace and own) or self.namespace.split(" ")[0] == own.split(" ")[0]

    @property
    def is_visible(self) -> bool:
        """Whether its pid means the same process here."""
        return bool(self.namespace) and self.namespace == own_namespace()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs. Only for one that is visible."""
        stat = read_stat(self.pid)
        return stat is not None and stat.is_alive and stat.started_ticks == self.started_ticks

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; return False if that cannot be done: nothing was signaled
        then.

        Raises:
            ProcessLookupError: it has exited.
            PermissionError: it belongs to another user.
        """
        if not self.is_visible:
            return False
        send_signals(self.pid, self.started_ticks, number)
        return True


def send_signals(pid: int, started_ticks: int, *numbers: signal.Signals) -> None:
    """Send signals to exactly one process, through a descriptor of it (pidfd), which no later process with
    its pid can have.

    Args:
        pid: of the process.
        started_ticks: when it was started, as in `ProcessIdentity`.
        numbers: of the signals.

    Raises:
        ProcessLookupError: it has exited.
        PermissionError: it belongs to another user.
        OSError: no descriptor is left.
    """
    descriptor = os.pidfd_open(pid)
    try:
        stat = read_stat(pid)
        if stat is None or not stat.is_alive or stat.started_ticks != started_ticks:
            raise ProcessLookupError(f"process {pid} has exited")
        for number in numbers:
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def own_namespace() -> str:
    """Return the boot of the machine and the namespace of pids; empty if the kernel does not tell."""
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PID_NAMESPACE)}"
    except OSError:
        return ""


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    stat = read_stat(os.getpid())
    return ProcessIdentity(
        pid=os.getpid(),
        started_ticks=stat.started_ticks if stat is not None else 0,
        namespace=own_namespace(),
        host=socket.gethostname(),
    )
