"""The socket that a rank's main thread waits on, for example of a store that other ranks write to.

Called by `runtime.detection.activity` for ranks that do nothing, to say who waits for whom. Not part of any proof.
"""

from __future__ import annotations

import os
import platform
import struct

from grpo_run.runtime.detection.waits.processes import read_memory, read_system_call
from grpo_run.watchdog.waits.system_calls import parse_system_call

_MACHINE = platform.machine()
_RECEIVING = frozenset({"read", "recvfrom", "recvmsg"})
_POLLING = frozenset({"poll", "ppoll"})
_POLLFD = struct.Struct("<ihh")


def read_awaited_socket(pid: int) -> int | None:
    """Return the inode of the socket that the main thread receives from, or polls alone; None if it does not."""
    registers, _ = read_system_call(pid, pid)
    call = parse_system_call(registers, _MACHINE)
    if call is None:
        return None
    descriptor: int | None = None
    if call.name in _RECEIVING:
        descriptor = call.arguments[0]
    elif call.name in _POLLING and call.arguments[1] == 1:
        raw = read_memory(pid, call.arguments[0], _POLLFD.size)
        descriptor = _POLLFD.unpack(raw)[0] if raw is not None else None
    if descriptor is None:
        return None
    try:
        target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return None
    return int(target[8:-1]) if target.startswith("socket:[") else None
