"""Memory of the whole node at one moment: the kernel's, the cgroup's, and every GPU's with who uses it.

Called by `collection.py`. Bounded by what the kernel and the driver have to say. Does not add up or judge.
"""

from __future__ import annotations

from typing import Any

from grpo_run.watchdog.processes import read_file


def read_node(pid: int) -> bytes:
    """/proc/meminfo, then how much the memory cgroup of `pid` holds and may hold (version 1 and 2)."""
    parts = [read_file("/proc/meminfo") or b"/proc/meminfo could not be read\n"]
    groups = read_file(f"/proc/{pid}/cgroup") or b""
    for line in groups.decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        names: tuple[str, ...]
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.current", "memory.max", "memory.events")
        elif "memory" in controllers.split(","):
            root, names = "/sys/fs/cgroup/memory", ("memory.usage_in_bytes", "memory.limit_in_bytes")
        else:
            continue
        for name in names:
            # inside a container the group is mounted as the root
            for file in (f"{root}{path.rstrip('/')}/{name}", f"{root}/{name}"):
                if (content := read_file(file)) is not None:
                    parts.append(f"{file}: ".encode() + content)
                    break
    return b"".join(parts)


def read_gpus() -> dict[str, Any]:
    """Memory of every GPU and who uses it, `{"devices": […]}`; none without a driver, `{"error": …}` with a sick one.

    May hang as long as the driver does.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return {"devices": []}
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    try:
        count = pynvml.nvmlDeviceGetCount()
        devices = [_read_gpu(index) for index in range(count)]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    return {"devices": devices}


def _read_gpu(index: int) -> dict[str, Any]:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    users = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "index": index,
        "used_bytes": int(memory.used),
        "total_bytes": int(memory.total),
        "processes": [{"pid": user.pid, "used_bytes": user.usedGpuMemory} for user in users],
    }
