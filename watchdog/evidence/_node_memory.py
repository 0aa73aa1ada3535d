"""Memory of the node at one moment: the machine's, the memory cgroup's, and every GPU's with its processes.

`BackgroundCall` bounds the time that a driver may take. Called by `collection.py`. Does not add up or judge.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from grpo_run.watchdog.gpu_driver import GpuDriverError, NoGpuDriver, gpu_driver
from grpo_run.watchdog.memory.cgroups import memory_cgroups
from grpo_run.watchdog.processes import read_file


class BackgroundCall:
    """A function running in a daemon thread. `result` is None until it has returned.

    Args:
        function: returns something other than None.
        arguments: its arguments.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result = function(*arguments)

    def join(self, deadline: float) -> None:
        """Wait until the function has returned, at most until `deadline` (monotonic seconds)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))


def read_node_memory(pid: int) -> bytes:
    """Return /proc/meminfo, then usage, limit and events of the memory cgroup of `pid` (versions 1 and 2)."""
    parts = [read_file("/proc/meminfo") or b"/proc/meminfo could not be read\n"]
    groups = memory_cgroups(read_file(f"/proc/{pid}/cgroup") or b"")
    for limit_file in dict.fromkeys(group.limit_file for group in groups):
        hierarchy = [group for group in groups if group.limit_file == limit_file]
        own, root = hierarchy[0], hierarchy[-1]
        for name in (own.usage_file, own.limit_file, "memory.events"):
            # inside a container the process's own group is mounted as the root
            for file in (own.folder / name, root.folder / name):
                if (content := read_file(str(file))) is not None:
                    parts.append(f"{file}: ".encode() + content)
                    break
    return b"".join(parts)


def read_gpu_memory() -> dict[str, Any]:
    """Return memory and processes of every GPU as `{"devices": […]}`, or `{"error": …}`.

    Without a driver there are no devices.
    May hang for as long as the driver does.
    """
    try:
        with gpu_driver() as nvml:
            return {"devices": [_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]}
    except NoGpuDriver:
        return {"devices": []}
    except GpuDriverError as error:
        return {"error": str(error)}


def _read_gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    users = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "index": index,
        "used_bytes": int(memory.used),
        "total_bytes": int(memory.total),
        "processes": [{"pid": user.pid, "used_bytes": user.usedGpuMemory} for user in users],
    }
