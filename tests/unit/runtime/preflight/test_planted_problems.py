"""Problems that are planted in a machine are found, and a machine with usual settings has none."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.full_disk import small_disk

from grpo_run.runtime.preflight import reading
from grpo_run.runtime.preflight.checks import GIB, MIB, Facts, Finding, State, descriptors_needed, examine
from grpo_run.runtime.preflight.reading import read_facts, write_file
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE

FILES = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "CapEff:\t0000000000000000\n",
    "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nCommitLimit: 32000000 kB\n"
    "Committed_AS: 900000 kB\n",
    "proc/vmstat": "oom_kill 0\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/class/net/lo/mtu": "65536\n",
    "sys/class/net/eth0/mtu": "1500\n",
}
"""A sound machine without GPU."""
GROUP = "sys/fs/cgroup"


class NVMLError(Exception):
    """Stands for NVML's own."""


class NoLibrary(NVMLError):
    """Stands for `NVMLError_LibraryNotFound`."""


class NoDriver(NVMLError):
    """Stands for `NVMLError_DriverNotLoaded`."""


def nvml(count: int = 0, **answers: Any) -> types.ModuleType:
    """`pynvml` with sound GPUs, the last of which gives these answers."""

    def answer(name: str, sound: Any) -> Callable[..., Any]:
        def call(handle: int = count - 1, *_: Any) -> Any:
            value = answers.get(name, sound) if handle == count - 1 else sound
            if isinstance(value, Exception):
                raise value
            return value

        return call

    module = types.ModuleType("pynvml")
    sound = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": count,
        "nvmlDeviceGetUUID": "GPU-8932f937-d72c",
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(free=79 * GIB, total=80 * GIB),
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetRemappedRows": NVMLError("not supported"),
        "nvmlDeviceGetTotalEccErrors": NVMLError("not supported"),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,  # idle
        "nvmlDeviceGetComputeMode": 0,
    }  # fmt: skip
    for name, value in sound.items():
        setattr(module, name, answer(name, value))
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    errors = {"": NVMLError, "_LibraryNotFound": NoLibrary, "_DriverNotLoaded": NoDriver}
    for suffix, error in errors.items():
        setattr(module, f"NVMLError{suffix}", error)
    return module


Machine = Callable[..., Facts]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Read the facts of a machine that differs from a sound one by files, GPUs, variables and limits."""
    monkeypatch.setattr(reading, "_left_processes", lambda: iter(()))
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    root = tmp_path / "root"
    limits = {"NOFILE": 1024, "NPROC": 96365, "MEMLOCK": 8 * MIB, "FSIZE": resource.RLIM_INFINITY}

    def read(
        files: dict[str, str] | None = None,
        gpus: types.ModuleType | None = None,
        environment: dict[str, str] | None = None,
        lowered: dict[str, int] | None = None,
        **known: Any,
    ) -> Facts:
        for path, content in {**FILES, **(files or {})}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
        set_ = {
            getattr(resource, f"RLIMIT_{name}"): value
            for name, value in {**limits, **(lowered or {})}.items()
        }
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (set_.get(kind, 0), resource.RLIM_INFINITY))
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setitem(sys.modules, "pynvml", gpus or nvml(nvmlInit=NoLibrary("none")))
        return read_facts(tmp_path / "out" / "run", environment or {}, root=root, **known)

    return read


def problems(facts: Facts) -> list[Finding]:
    """What is neither sound nor not applicable. The speed of the test's disk is not the machine's fault."""
    found = examine(facts)
    assert all(one.text for one in found)
    bad = [one for one in found if one.state in (State.warn, State.fail)]
    assert all(one.fix for one in bad)
    return bad


def cuda_builds(names: Iterable[str]) -> dict[str, str]:
    """Versions of libraries that can use GPUs."""
    return dict.fromkeys(names, "2.13.0")


FULL = types.SimpleNamespace(free=7 * GIB, total=80 * GIB)
SOUND: dict[str, dict[str, Any]] = {
    "a laptop": {},
    "GPUs": {"gpus": nvml(2), "environment": {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "^docker,lo"}},
    "GPUs chosen": {
        "gpus": nvml(4), "environment": {"CUDA_VISIBLE_DEVICES": "1,3", "NCCL_SOCKET_IFNAME": "eth"}
    },
    "other GPUs in use": {"gpus": nvml(3, nvmlDeviceGetMemoryInfo=FULL), "ranks": 2},
    "a hidden GPU in use": {
        "gpus": nvml(3, nvmlDeviceGetMemoryInfo=FULL), "environment": {"CUDA_VISIBLE_DEVICES": "0,1"}
    },
    "GPUs by name": {"gpus": nvml(1), "environment": {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}},
    "Gloo's interface": {"environment": {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}},
    "Ubuntu": {"files": {"proc/sys/kernel/yama/ptrace_scope": "1\n"}},
    "hardened, as root": {
        "files": {
            "proc/sys/kernel/yama/ptrace_scope": "2\n", "proc/self/status": "CapEff:\t000001ffffffffff\n",
        }
    },
    "a container": {
        "files": {
            f"{GROUP}/memory.max": f"{16 * GIB}\n", f"{GROUP}/memory.current": f"{8 * GIB}\n",
            f"{GROUP}/memory.events": "oom_kill 3\n",
            f"{GROUP}/pids.max": "max\n", f"{GROUP}/pids.current": "9\n",
        }
    },
    "a flight recorder of its own size": {"environment": {"TORCH_FR_BUFFER_SIZE": "2000"}},
    "eight ranks": {"ranks": 8},
    "InfiniBand": {
        "files": {"sys/class/infiniband/mlx5_0/node_type": "1\n"},
        "lowered": {"MEMLOCK": resource.RLIM_INFINITY},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_usual_machines_have_no_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What works by default is sound."""
    if "gpus" in SOUND[name]:
        monkeypatch.setattr(reading, "installed_versions", cuda_builds)
    assert problems(machine(**SOUND[name])) == []


USER = [types.SimpleNamespace(pid=1, usedGpuMemory=9)]
PLANTED: dict[str, tuple[dict[str, Any], str, State, str]] = {
    "a GPU in use": (
        {"gpus": nvml(2, nvmlDeviceGetComputeRunningProcesses=USER)}, "GPU 1", State.warn, "in use by 1 (",
    ),
    "a full GPU": (
        {"gpus": nvml(2, nvmlDeviceGetMemoryInfo=FULL), "ranks": 2},
        "GPU 1", State.fail, "7.0 GiB of 80.0 GiB free",
    ),
    "a full GPU that may be meant so": (
        {"gpus": nvml(2, nvmlDeviceGetMemoryInfo=FULL)}, "GPU 1", State.warn, "7.0 GiB of 80.0 GiB free",
    ),
    "a full GPU by name": (
        {
            "gpus": nvml(1, nvmlDeviceGetMemoryInfo=FULL), "ranks": 1,
            "environment": {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"},
        },
        "GPU 0", State.fail, "not visible here",
    ),
    "memory errors": ({"gpus": nvml(1, nvmlDeviceGetTotalEccErrors=3)}, "GPU 0", State.warn, "3 uncorrected"),
    "memory to be replaced": (
        {"gpus": nvml(1, nvmlDeviceGetRemappedRows=(0, 1, 1, 0))}, "GPU 0", State.warn, "next reset",
    ),
    "defective memory": (
        {"gpus": nvml(1, nvmlDeviceGetRemappedRows=(0, 1, 0, 1))}, "GPU 0", State.fail, "cannot be replaced",
    ),
    "a hot GPU": (
        {"gpus": nvml(1, nvmlDeviceGetCurrentClocksThrottleReasons=0x40)},
        "GPU 0", State.warn, "lowered the clocks",
    ),
    "a GPU for nobody": (
        {"gpus": nvml(1, nvmlDeviceGetComputeMode=2)}, "GPU 0", State.fail, "no process may",
    ),
    "a driver of another version": (
        {"gpus": nvml(nvmlInit=NVMLError("Driver/library version mismatch"))},
        "GPUs", State.fail, "version mismatch",
    ),
    "a driver without NVML": ({"files": {"dev/nvidiactl": ""}}, "GPUs", State.fail, "NVML does not answer"),
    "a GPU that does not exist": (
        {"gpus": nvml(2), "environment": {"CUDA_VISIBLE_DEVICES": "0,2"}},
        "visible GPUs", State.fail, "no GPU 2",
    ),
    "hidden GPUs": (
        {"gpus": nvml(2), "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        "visible GPUs", State.warn, "hides every GPU",
    ),
    "ranks that wait for ever": (
        {"gpus": nvml(1), "environment": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}},
        "NCCL", State.warn, "for ever",
    ),
    "no flight recorder": (
        {"environment": {"TORCH_FR_BUFFER_SIZE": "0"}},
        "flight recorder", State.warn, "no deadlock is proved",
    ),
    "a cable that is not there": (
        {"environment": {"GLOO_SOCKET_IFNAME": "ib0"}},
        "network interfaces", State.fail, "GLOO_SOCKET_IFNAME=ib0",
    ),
    "a full cgroup": (
        {"files": {f"{GROUP}/memory.max": f"{GIB}\n", f"{GROUP}/memory.current": f"{GIB - 99 * MIB}\n"}},
        "host memory", State.fail, "99 MiB free",
    ),
    "a cgroup nearly full": (
        {"files": {f"{GROUP}/memory.max": f"{8 * GIB}\n", f"{GROUP}/memory.current": f"{7 * GIB}\n"}},
        "host memory", State.warn, "1.0 GiB free",
    ),
    "a cgroup that dies as one": (
        {"files": {f"{GROUP}/memory.oom.group": "1\n"}},
        "kernel kills", State.warn, "killed with its launcher",
    ),
    "kills that cannot be told": (
        {"files": {"proc/vmstat": ""}}, "kernel kills", State.warn, "cannot be told",
    ),
    "few processes": (
        {"files": {f"{GROUP}/pids.max": "100\n", f"{GROUP}/pids.current": "40\n"}},
        "processes and threads", State.fail, "60 more",
    ),
    "few open files": (
        {"lowered": {"NOFILE": 200}, "ranks": 8}, "open files", State.fail, "200, and 256 are needed",
    ),
    "few processes of the user": ({"lowered": {"NPROC": 50}}, "processes and threads", State.fail, "50 more"),
    "small files": ({"lowered": {"FSIZE": MIB}}, "file size", State.fail, "at most 1.0 MiB"),
    "little locked memory": (
        {"files": {"sys/class/infiniband/mlx5_0/node_type": "1\n"}},
        "locked memory", State.warn, "InfiniBand needs more",
    ),
    "no tracing": (
        {"files": {"proc/sys/kernel/yama/ptrace_scope": "3\n"}}, "stacks", State.warn, "ptrace_scope 3",
    ),
    "no tracing but for root": (
        {"files": {"proc/sys/kernel/yama/ptrace_scope": "2\n"}}, "stacks", State.warn, "ptrace_scope 2",
    ),
    "strict overcommit": (
        {"files": {"proc/sys/vm/overcommit_memory": "2\n"}}, "overcommit", State.warn, "29.7 GiB",
    ),
    "strict overcommit, nothing left": (
        {"files": {
            "proc/sys/vm/overcommit_memory": "2\n",
            "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nCommitLimit: 9 kB\n"
            "Committed_AS: 10 kB\n",
        }},
        "overcommit", State.fail, "0 bytes",
    ),
    "a slow clock": (
        {"files": {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"}},
        "clock", State.warn, "hpet is slow",
    ),
    "a date in the past": ({"wall_clock": lambda: 1e9}, "clock", State.fail, "years in the past"),
    "checkpoints larger than the disk": (
        {"checkpoint_bytes": 1 << 50}, "disk", State.fail, "too little for a checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_problem_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It, and nothing else."""
    arguments, check, state, text = PLANTED[name]
    if "gpus" in arguments:
        monkeypatch.setattr(reading, "installed_versions", cuda_builds)
    (found,) = problems(machine(**arguments))
    assert (found.name, found.state) == (check, state)
    assert text in found.text


def test_a_library_that_is_missing_or_cannot_use_the_gpus_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU build of torch is sound on a machine without GPUs."""
    versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "accelerate": "1.15.0"}
    monkeypatch.setattr(reading, "installed_versions", lambda names: versions)
    (missing,) = problems(machine())
    assert missing.sentence == "trl: not installed; pip install trl"
    assert [one.name for one in problems(machine(gpus=nvml(1)))] == ["torch", "trl"]


def test_a_port_in_use_is_found(machine: Machine) -> None:
    """Whoever listens, on whichever address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = problems(machine(port=port))
        assert (found.name, found.state) == ("master port", State.fail)
        assert found.text == f"{port}: Address already in use"
    assert problems(machine(port=port)) == []


def test_a_host_name_without_an_address_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo resolves it; on one node it uses the loopback address instead."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.invalid")
    assert problems(machine()) == []
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    (found,) = problems(machine(port=port))
    assert found.sentence == (
        "host name: node7.invalid has no address: Gloo cannot reach other nodes; add it to /etc/hosts"
    )


def test_small_shared_memory_and_a_small_disk_are_found(machine: Machine, tmp_path: Path) -> None:
    """A container has 64 MiB of shared memory by default."""
    with small_disk(tmp_path / "small", 64 * MIB) as disk:
        (tmp_path / "root" / "dev").mkdir(parents=True)
        (tmp_path / "root" / "dev" / "shm").symlink_to(disk.folder)
        (found,) = problems(machine())
        assert (found.name, found.state) == ("shared memory", State.warn)
        disk.leave(4 * MIB)
        (found,) = problems(machine())
        assert (found.name, found.state) == ("shared memory", State.fail)
        (tmp_path / "out").symlink_to(disk.folder)
        assert {one.name: one.state for one in problems(machine())}["disk"] is State.fail
        assert write_file(disk.folder, 64 * MIB) == ("No space left on device", None)


def test_a_folder_that_takes_no_file_is_found(machine: Machine, tmp_path: Path) -> None:
    """Root may write anywhere but there."""
    (tmp_path / "out").symlink_to("/proc")
    found = {one.name: one for one in problems(machine())}["disk"]
    assert found.state is State.fail
    assert "no file can be written" in found.text


def test_the_disk_is_measured_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    """A file of the given size, or of one byte."""
    problem, speed = write_file(tmp_path, 8 * MIB)
    assert problem is None
    assert speed is not None
    assert speed > 0
    assert write_file(tmp_path, 0) == (None, None)
    assert list(tmp_path.iterdir()) == []


SLEEP = (
    "import os, sys, time; os.fork() and sys.exit(); os.setsid(); print(os.getpid(), flush=True);"
    " os.close(1); time.sleep(60)"
)


@pytest.fixture
def orphan() -> Iterator[tuple[int, str]]:
    """A process of a run whose parent has exited, and its token."""
    token = f"test{time.monotonic_ns()}"
    ran = subprocess.run(
        [sys.executable, "-c", SLEEP],
        env={**os.environ, TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        check=True,
    )
    pid = int(ran.stdout)
    yield pid, token
    os.kill(pid, signal.SIGKILL)


def test_a_process_of_a_dead_run_is_found(orphan: tuple[int, str]) -> None:
    """By its token; a run is alive while a launcher is above one of its processes."""
    pid, token = orphan
    assert SLEEP[:20] in dict(reading._left_processes())[pid]
    code = f"import os; os.environ['{TOKEN_VARIABLE}'] = '{token}'; os.system('sleep 60; true')"
    with subprocess.Popen(
        [sys.executable, "-c", code, "grpo-run launch"], start_new_session=True
    ) as launcher:
        deadline = time.monotonic() + 10
        while pid in dict(reading._left_processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = dict(reading._left_processes())
        os.killpg(launcher.pid, signal.SIGKILL)
    assert pid not in left


@pytest.mark.parametrize(
    ("changes", "check", "state"),
    [
        ({"disk_bytes": 256 * MIB}, "disk", State.ok),
        ({"disk_bytes": 256 * MIB - 1}, "disk", State.fail),
        ({"disk_bytes": 256 * MIB + 2 * GIB, "checkpoint_bytes": GIB}, "disk", State.ok),
        ({"disk_bytes": 256 * MIB + 2 * GIB - 1, "checkpoint_bytes": GIB}, "disk", State.warn),
        ({"disk_bytes": 256 * MIB + GIB - 1, "checkpoint_bytes": GIB}, "disk", State.fail),
        ({"disk_files": 999}, "disk", State.fail),
        ({"disk_files": 1000}, "disk", State.ok),
        ({"disk_bytes_per_second": None}, "disk speed", State.not_applicable),
        ({"disk_bytes_per_second": 10.0 * MIB}, "disk speed", State.ok),
        ({"disk_bytes_per_second": 10.0 * MIB - 1}, "disk speed", State.warn),
        ({"disk_bytes_per_second": 100.0 * MIB, "checkpoint_bytes": 60000 * MIB}, "disk speed", State.ok),
        ({"disk_bytes_per_second": 100.0 * MIB, "checkpoint_bytes": 60001 * MIB}, "disk speed", State.warn),
        ({"limits": {"nofile": descriptors_needed(4)}, "ranks": 4}, "open files", State.ok),
        ({"limits": {"nofile": descriptors_needed(4) - 1}, "ranks": 4}, "open files", State.fail),
        ({"free_tasks": 400, "ranks": 4}, "processes and threads", State.ok),
        ({"free_tasks": 399, "ranks": 4}, "processes and threads", State.fail),
        ({"shared_memory_bytes": None}, "shared memory", State.warn),
        ({"shared_memory_bytes": GIB}, "shared memory", State.ok),
        ({"shared_memory_bytes": GIB - 1}, "shared memory", State.warn),
        ({"shared_memory_bytes": 8 * MIB}, "shared memory", State.warn),
        ({"shared_memory_bytes": 8 * MIB - 1}, "shared memory", State.fail),
        ({"now": 1.7e9}, "clock", State.ok),
        ({"now": 1.6e9}, "clock", State.fail),
        ({"py_spy": None}, "stacks", State.warn),
        ({"left_processes": {7: "python train.py"}}, "left-over processes", State.warn),
    ],
)
def test_limits_of_what_is_sound(machine: Machine, changes: dict[str, Any], check: str, state: State) -> None:
    """To the byte."""
    found = {one.name: one for one in examine(replace(machine(), **changes))}
    assert found[check].state is state, found[check]
