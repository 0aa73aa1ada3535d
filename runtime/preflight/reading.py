"""Read the facts about this machine: /proc, /sys, limits, NVML, a file that is written, a port that is bound.

Some 0.1 s, besides the file and NVML. Files are read below a root, which is `/` but in tests. What cannot be
read is unknown, never an error. Called by `cli/doctor.py` and `cli/launching/preflight.py`. Judges nothing,
and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_run.runtime.preflight.checks import Facts, Gpu
from grpo_run.runtime.snapshots.headroom import cgroup_headroom, machine_headroom
from grpo_run.runtime.upstream.versions import TESTED, installed_versions
from grpo_run.watchdog.evidence.stack_capture import find_py_spy
from grpo_run.watchdog.memory.cgroups import memory_cgroups, read_fields
from grpo_run.watchdog.processes import (
    ProcessStat,
    read_arguments,
    read_environment,
    read_file,
    read_processes,
)
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE

OPTIONAL_LIBRARIES = ("deepspeed", "vllm", "peft", "nvidia-ml-py", "py-spy")
WRITTEN_BYTES, BLOCK_BYTES, WRITE_SECONDS = 64 << 20, 4 << 20, 5.0
"""Size of the file that measures the disk, and how long it is written at most."""
LIMITS = ("nofile", "nproc", "memlock", "fsize", "core")
CAP_SYS_PTRACE = 19
SLOWDOWN, UNCORRECTED, VOLATILE, PROHIBITED = 0x08 | 0x40 | 0x80, 1, 0, 2
"""Of NVML: hardware reasons for lower clocks, kinds of memory errors, a compute mode."""
SUPERVISOR_WORDS = ("grpo-run", "grpo_run")
"""One of them is in the command line of every supervisor."""


def read_facts(
    folder: Path,
    environment: Mapping[str, str],
    *,
    ranks: int = 0,
    port: int | None = None,
    checkpoint_bytes: int = 0,
    written_bytes: int = 0,
    root: Path = Path("/"),
    wall_clock: Callable[[], float] = time.time,
) -> Facts:
    """Read everything.

    Args:
        folder: where checkpoints and the run's files will be; it need not exist.
        environment: of the ranks.
        ranks: to be started on this machine; 0 if unknown.
        port: that node 0 will listen on, if it is a fixed one on this machine.
        checkpoint_bytes: size of the checkpoints to come; 0 if unknown.
        written_bytes: size of the file that measures the disk; 0 for none.
        root: below which /proc, /sys and /dev are.
        wall_clock: seconds since the epoch.
    """

    def read(path: str) -> bytes:
        return read_file(str(root / path)) or b""

    def names(path: str) -> frozenset[str]:
        return frozenset(os.listdir(root / path) if (root / path).is_dir() else ())

    membership, memory = read("proc/self/cgroup"), read("proc/meminfo")
    groups = memory_cgroups(membership, root / "sys/fs/cgroup")
    kills = [count for group in groups if (count := group.kills()) is not None]
    rooms = [*cgroup_headroom(membership, root / "sys/fs/cgroup"), machine_headroom(memory)]
    least = min(filter(None, rooms), key=lambda room: (room.usable_bytes, room.free_bytes))
    fields = read_fields(memory)
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0] for name in LIMITS}
    gpus, gpu_problem = read_gpus((root / "dev/nvidiactl").exists())
    folder = _existing(folder.absolute())
    disk_problem, speed = write_file(folder, written_bytes)
    capabilities = read("proc/self/status").partition(b"CapEff:")[2].split(b"\n")[0]
    return Facts(
        versions=dict.fromkeys(TESTED) | installed_versions((*TESTED, *OPTIONAL_LIBRARIES)),
        environment=environment,
        gpus=gpus,
        gpu_problem=gpu_problem,
        left_processes=dict(_left_processes()),
        shared_memory_bytes=_free_bytes(root / "dev/shm") if (root / "dev/shm").is_dir() else None,
        folder=str(folder),
        disk_bytes=_free_bytes(folder),
        disk_files=os.statvfs(folder).f_favail if os.statvfs(folder).f_files else None,
        disk_problem=disk_problem,
        disk_bytes_per_second=speed,
        checkpoint_bytes=checkpoint_bytes,
        limits={name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY},
        ranks=ranks,
        free_tasks=_free_tasks(limits["nproc"], membership, root),
        clock_source=read("sys/devices/system/clocksource/clocksource0/current_clocksource").decode().strip(),
        now=wall_clock(),
        host_name=socket.gethostname(),
        host_address=_address(socket.gethostname()),
        interfaces=names("sys/class/net"),
        infiniband=bool(names("sys/class/infiniband")),
        port=port,
        port_problem=None if port is None else _port_problem(port),
        memory_limit=least.name,
        memory_bytes=least.free_bytes,
        memory_usable_bytes=least.usable_bytes,
        kernel_kills=kills[0] if kills else read_fields(read("proc/vmstat")).get("oom_kill"),
        kills_whole_group=any(group.kills_whole_group for group in groups),
        ptrace_scope=_number(read("proc/sys/kernel/yama/ptrace_scope")),
        may_trace=bool((_number(capabilities, 16) or 0) >> CAP_SYS_PTRACE & 1),
        py_spy=find_py_spy(),
        overcommit=_number(read("proc/sys/vm/overcommit_memory")),
        commit_room_bytes=max(0, fields.get("CommitLimit", 0) - fields.get("Committed_AS", 0)) * 1024,
    )


def _number(content: bytes, base: int = 10) -> int | None:
    with contextlib.suppress(ValueError):
        return int(content, base)
    return None


def read_gpus(has_driver: bool) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs, and why they cannot be read. May hang for as long as the driver does.

    Args:
        has_driver: the kernel's part of the driver is loaded.
    """
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        found = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        nvml.nvmlShutdown()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
        return (), f"there is a driver, but NVML does not answer: {error}" if has_driver else None
    except nvml.NVMLError as error:
        return (), f"NVML: {error}"
    return found, None


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(name: str, *arguments: Any) -> Any:
        """Return an answer; None if this GPU does not have it."""
        with contextlib.suppress(nvml.NVMLError):
            return getattr(nvml, name)(handle, *arguments)
        return None

    users = ask("nvmlDeviceGetComputeRunningProcesses") or ()
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    return Gpu(
        index=index,
        uuid=str(ask("nvmlDeviceGetUUID")),
        free_bytes=int(memory.free),
        total_bytes=int(memory.total),
        users=tuple(f"{user.pid} ({read_arguments(user.pid)[:60] or 'not visible here'})" for user in users),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE) or 0,
        remap_pending=bool(pending),
        remap_failed=bool(failed),
        slowed_down=bool((ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0) & SLOWDOWN),
        prohibited=ask("nvmlDeviceGetComputeMode") == PROHIBITED,
    )


def _left_processes() -> Iterator[tuple[int, str]]:
    """Yield pid and command of the processes that carry the token of a run without a supervisor.

    A supervisor is above at least one of the processes that carry its token.
    """
    table, mark = read_processes(), f"{TOKEN_VARIABLE}=".encode()
    tokens: dict[int, bytes] = {}
    for pid in table:
        if found := [word for word in read_environment(pid).split(b"\0") if word.startswith(mark)]:
            tokens[pid] = found[0]
    live = {token for pid, token in tokens.items() if _is_supervised(pid, table, tokens)}
    for pid, token in tokens.items():
        if token not in live and table[pid].is_alive:
            yield pid, read_arguments(pid) or table[pid].name


def _is_supervised(pid: int, table: Mapping[int, ProcessStat], tokens: Mapping[int, bytes]) -> bool:
    """Whether the nearest ancestor with another token, or none, is a supervisor."""
    token = tokens[pid]
    while tokens.get(pid) == token:
        pid = table[pid].parent
    return any(word in read_arguments(pid) for word in SUPERVISOR_WORDS)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def write_file(folder: Path, size_bytes: int) -> tuple[str | None, float | None]:
    """Write a file that has no name, and return why that fails, and bytes per second unless its size is 0."""
    block, written, began = os.urandom(BLOCK_BYTES if size_bytes else 1), 0, time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while written < max(size_bytes, 1) and time.monotonic() - began < WRITE_SECONDS:
                written += file.write(block)
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error), None
    return None, written / (time.monotonic() - began) if size_bytes else None


def _free_tasks(limit: int, membership: bytes, root: Path) -> int | None:
    """Return how many processes and threads the user's limit or the cgroup allows; None without a limit."""
    left = []
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # the kernel exempts root
        left.append(limit)
    for line in membership.decode(errors="replace").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "pids"):
            for group in {root / "sys/fs/cgroup" / controllers / part for part in (path.strip("/"), "")}:
                most, now = (_number(read_file(f"{group}/pids.{name}") or b"") for name in ("max", "current"))
                left += [most - now] if most is not None and now is not None else []
    return min(left, default=None)


def _address(host: str) -> str | None:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None)[0][4][0])
    return None


def _port_problem(port: int) -> str | None:
    """Return why nobody can listen on all addresses at a port; None if one can."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None
