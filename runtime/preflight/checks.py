"""Judge the facts about a machine before a run: one finding of each check, with what to do in plain words.

A failure ends a run or keeps it from starting; a warning costs time, evidence or a guarantee. What works by
default is neither. Called by `cli/doctor.py` and `cli/launching/preflight.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from grpo_run.watchdog.text import duration_text, size_text

MIB, GIB = 1 << 20, 1 << 30
SHARED_BYTES, SHARED_LEAST_BYTES, DISK_LEAST_BYTES, MEMORY_LEAST_BYTES = GIB, 8 * MIB, 256 * MIB, 256 * MIB
"""Containers have 64 MiB of shared memory by default: no snapshot, and little for data loaders."""
SLOW_BYTES_PER_SECOND, LONG_SAVE_SECONDS, FEW_FILES, FEW_TASKS = 10 * MIB, 600, 1000, 100
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
EARLIEST_TIME = 1.7e9
GPU_LEAST_FREE = 0.1
"""Share of its memory."""
DESCRIPTORS, DESCRIPTORS_PER_RANK = 128, 16
"""Open files of the supervisor: libraries, the run's files, connections to the metrics, which take a fourth
at most, and evidence of a fault. Of a rank: its pipe, sentinel and files, and a connection to the store for
each process group."""


class State(str, Enum):
    """What a check has found."""

    ok = "ok"
    warn = "warn"
    fail = "fail"
    not_applicable = "not applicable"


WARN, FAIL, NONE = State.warn, State.fail, State.not_applicable
Problem = tuple[object, State, str, str]
"""Whether it is there, what it is then, what was found, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as NVML describes it; `users` compute on it."""

    index: int
    uuid: str
    free_bytes: int
    total_bytes: int
    users: tuple[str, ...] = ()
    uncorrected_errors: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    slowed_down: bool = False
    prohibited: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a machine. None: unknown, unlimited, or nothing of the kind.

    `left_processes` are the command lines, by pid, of processes of runs whose supervisor is gone. Sizes are
    of what is free, `memory_usable_bytes` of what is beyond a reserve; `disk_files` and `free_tasks` are how
    many more are possible. `limits` are the soft limits by name, without unlimited ones; `may_trace` is
    whether this process has CAP_SYS_PTRACE. `checkpoint_bytes` and `ranks` are those of the run to come, 0
    if unknown.
    """

    versions: Mapping[str, str | None]
    environment: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    left_processes: Mapping[int, str]
    shared_memory_bytes: int | None
    folder: str
    disk_bytes: int
    disk_files: int | None
    disk_problem: str | None
    disk_bytes_per_second: float | None
    checkpoint_bytes: int
    limits: Mapping[str, int]
    ranks: int
    free_tasks: int | None
    clock_source: str
    now: float
    host_name: str
    host_address: str | None
    interfaces: frozenset[str]
    infiniband: bool
    port: int | None
    port_problem: str | None
    memory_limit: str
    memory_bytes: int
    memory_usable_bytes: int
    kernel_kills: int | None
    kills_whole_group: bool
    ptrace_scope: int | None
    may_trace: bool
    py_spy: str | None
    overcommit: int | None
    commit_room_bytes: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check has found, and what to do about it ("" if nothing)."""

    name: str
    state: State
    text: str
    fix: str = ""

    @property
    def sentence(self) -> str:
        """The finding as one line."""
        return f"{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def examine(facts: Facts) -> list[Finding]:
    """Return one finding of each check, in the order in which they are shown."""
    parts = (_libraries, _gpus, _settings, _leftovers_and_room, _limits, _network, _memory, _kernel)
    return [finding for part in parts for finding in part(facts)]


def descriptors_needed(ranks: int) -> int:
    """Return how many open files the supervisor of so many ranks needs."""
    return DESCRIPTORS + DESCRIPTORS_PER_RANK * ranks


def _judge(name: str, fine: str, *problems: Problem) -> Finding:
    """Return the first problem that is there, or that all is fine."""
    for is_there, state, text, fix in problems:
        if is_there:
            return Finding(name=name, state=state, text=text, fix=fix)
    return Finding(name=name, state=State.ok, text=fine)


def _libraries(facts: Facts) -> Iterator[Finding]:
    for name, version in facts.versions.items():
        blind = name == "torch" and "+cpu" in (version or "") and facts.gpus
        yield _judge(
            name, version or "",
            (version is None, FAIL, "not installed", f"pip install {name}"),
            (blind, FAIL, f"{version} cannot use this machine's GPUs", "install the CUDA build of torch"),
        )  # fmt: skip


def _gpus(facts: Facts) -> Iterator[Finding]:
    problem = (facts.gpu_problem, FAIL, str(facts.gpu_problem), "see nvidia-smi; restart the machine")
    yield _judge("GPUs", f"{len(facts.gpus)} found", problem, (not facts.gpus, NONE, "no GPU", ""))
    visible = _visible(facts)
    chosen = [
        gpu
        for word in visible or ()
        for gpu in facts.gpus
        if word and (word == str(gpu.index) or gpu.uuid.startswith(word))
    ]
    full = FAIL if facts.ranks else WARN  # else another one may be meant for it, such as vLLM's server
    for gpu in (facts.gpus if visible is None else chosen)[: facts.ranks or None]:
        free = f"{size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} free"
        users = f"{free}, in use by {', '.join(gpu.users[:3]) or 'processes that are not visible here'}"
        yield _judge(
            f"GPU {gpu.index}", free,
            (gpu.prohibited, FAIL, "no process may compute on it", f"nvidia-smi -i {gpu.index} -c DEFAULT"),
            (gpu.remap_failed, FAIL, "defective memory that cannot be replaced", "use another GPU"),
            (gpu.free_bytes < GPU_LEAST_FREE * gpu.total_bytes, full, users, "end them, or hide this GPU"),
            (gpu.remap_pending, WARN, "defective memory is replaced at the next reset", "reset this GPU"),
            (gpu.uncorrected_errors, WARN, f"{gpu.uncorrected_errors} uncorrected memory errors", "reset it"),
            (gpu.slowed_down, WARN, "the hardware has lowered the clocks", "look at cooling and power"),
            (gpu.users, WARN, users, "end them if they are left over"),
        )  # fmt: skip


def _visible(facts: Facts) -> list[str] | None:
    """Return the words of CUDA_VISIBLE_DEVICES; None if it is not set."""
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [word.strip() for word in visible.split(",")]


def _settings(facts: Facts) -> Iterator[Finding]:
    none = (not facts.gpus, NONE, "no GPU", "")
    visible, known = _visible(facts), {str(gpu.index) for gpu in facts.gpus}
    shown = ",".join(visible or ["all"])
    missing = [word for word in visible or () if word.isdecimal() and word not in known]
    hides = visible is not None and visible[0] in ("", "-1")
    yield _judge(
        "visible GPUs", shown, none,
        (hides, WARN, "CUDA_VISIBLE_DEVICES hides every GPU", "unset it"),
        (missing, FAIL, f"CUDA_VISIBLE_DEVICES={shown}: no GPU {', '.join(missing)}", "correct it"),
    )  # fmt: skip
    set_ = sorted(f"{name}={value}" for name, value in facts.environment.items() if "NCCL_" in name)
    text = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"
    waits = (text in set_, WARN, f"{text}: ranks wait for a lost one for ever", "unset it")
    yield _judge("NCCL", ", ".join(set_) or "defaults", none, waits)
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    size = next((facts.environment[name] for name in names if name in facts.environment), "on")
    text = "its size is 0: collectives are not recorded, so no deadlock is proved"
    yield _judge("flight recorder", size, (size == "0", WARN, text, f"unset {' and '.join(names)}"))


def _leftovers_and_room(facts: Facts) -> Iterator[Finding]:
    left, pids = facts.left_processes, " ".join(map(str, facts.left_processes))
    named = ", ".join(f"{pid} ({left[pid][:60]})" for pid in list(left)[:3])
    text = f"{len(left)} of a run whose launcher is gone: {named}"
    yield _judge("left-over processes", "none", (left, WARN, text, f"kill {pids}, unless --keep kept it"))
    free = facts.shared_memory_bytes or 0
    text = f"{size_text(free)} free in /dev/shm"
    fix = "`grpo-run gc`; docker run --shm-size 16g or --ipc host"
    yield _judge(
        "shared memory", text,
        (facts.shared_memory_bytes is None, WARN, "no /dev/shm, so no snapshots in memory", "mount it"),
        (free < SHARED_LEAST_BYTES, FAIL, f"{text}; data loaders and NCCL need some", fix),
        (free < SHARED_BYTES, WARN, f"{text}, too little for snapshots in memory", fix),
    )  # fmt: skip
    planned, files, room = facts.checkpoint_bytes, facts.disk_files, facts.disk_bytes - DISK_LEAST_BYTES
    text = f"{size_text(facts.disk_bytes)} free in {facts.folder}"
    fix = "make room: `grpo-run gc`, `grpo-run checkpoints prune`"
    yield _judge(
        "disk", text,
        (facts.disk_problem, FAIL, f"no file can be written: {facts.disk_problem}", "another directory"),
        (room < planned, FAIL, f"{text}, too little for a checkpoint", fix),
        (files is not None and files < FEW_FILES, FAIL, f"{text}, for {files} files", "delete some"),
        (room < 2 * planned, WARN, f"{text}, too little for a second checkpoint", fix),
    )  # fmt: skip
    speed = facts.disk_bytes_per_second or 0.0
    seconds = planned / max(speed, 1.0)
    text = f"{size_text(int(speed))} per second, {duration_text(seconds)} for a checkpoint"
    yield _judge(
        "disk speed", text if planned else text.partition(",")[0],
        (facts.disk_bytes_per_second is None, NONE, "not measured", ""),
        (speed < SLOW_BYTES_PER_SECOND or seconds > LONG_SAVE_SECONDS, WARN, text, "save less often"),
    )  # fmt: skip


def _limits(facts: Facts) -> Iterator[Finding]:
    ranks, limits, tasks = facts.ranks or 1, facts.limits, facts.free_tasks
    size = {name: size_text(limits[name]) if name in limits else "unlimited" for name in _SIZES}
    needed, files = descriptors_needed(ranks), limits.get("nofile")
    text = f"{files}, and {needed} are needed for {ranks} rank(s)"
    few = (files is not None and files < needed, FAIL, text, f"ulimit -n {needed}")
    yield _judge("open files", str(files or "unlimited"), few)
    text = f"{tasks} more can be started" if tasks is not None else "unlimited"
    few = (tasks is not None and tasks < FEW_TASKS * ranks, FAIL, text, "raise `ulimit -u` or pids.max")
    yield _judge("processes and threads", text, few)
    text = f"{size['memlock']}: InfiniBand needs more"
    few = (limits.get("memlock", GIB) < GIB, WARN, text, "ulimit -l unlimited")
    yield _judge("locked memory", size["memlock"], (not facts.infiniband, NONE, "no InfiniBand", ""), few)
    few = (limits.get("fsize", GIB) < GIB, FAIL, f"at most {size['fsize']}", "ulimit -f unlimited")
    yield _judge("file size", size["fsize"], few)
    yield _judge("core files", size["core"])


_SIZES = ("memlock", "fsize", "core")


def _network(facts: Facts) -> Iterator[Finding]:
    name, have = facts.host_name, ", ".join(sorted(facts.interfaces))
    lost = facts.host_address is None and facts.port is not None  # one node uses the loopback address
    text, fix = f"{name} has no address: Gloo cannot reach other nodes", "add it to /etc/hosts"
    yield _judge("host name", f"{name}, {facts.host_address or 'without address'}", (lost, WARN, text, fix))
    wrong = [
        f"{variable}={value}"
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if (value := facts.environment.get(variable)) and not _exists(value, facts.interfaces)
    ]
    text = f"{', '.join(wrong)}: there is no such interface"
    yield _judge("network interfaces", have, (wrong, FAIL, text, f"unset it, or name one of {have}"))
    yield _judge(
        "master port", f"{facts.port} is free", (facts.port is None, NONE, "node 0 chooses a free one", ""),
        (facts.port_problem, FAIL, f"{facts.port}: {facts.port_problem}", "another --master-port"),
    )  # fmt: skip


def _exists(value: str, interfaces: frozenset[str]) -> bool:
    """Whether an interface is named, by its beginning; after `^` are those to leave out."""
    names = tuple(name for name in value.lstrip("=").split(",") if name)
    return value.startswith("^") or any(one.startswith(names) for one in interfaces)


def _memory(facts: Facts) -> Iterator[Finding]:
    text = f"{size_text(facts.memory_bytes)} free of {facts.memory_limit}"
    state = FAIL if facts.memory_bytes < MEMORY_LEAST_BYTES else WARN
    few = (not facts.memory_usable_bytes, state, text, "end other processes, or raise the limit")
    yield _judge("host memory", text, few)
    yield _judge(
        "kernel kills", "can be told from others",
        (facts.kills_whole_group, WARN, "a rank that takes too much memory is killed with its launcher",
         "set memory.oom.group to 0, or the kubelet's singleProcessOOMKill to true"),
        (facts.kernel_kills is None, WARN, "cannot be told from others", "mount the memory cgroup"),
    )  # fmt: skip
    room = facts.commit_room_bytes
    text = f"vm.overcommit_memory=2: {size_text(room)} can be reserved, and CUDA reserves more than it uses"
    strict = (facts.overcommit == 2, FAIL if room < GIB else WARN, text, "sysctl vm.overcommit_memory=0")
    yield _judge("overcommit", "allowed", strict)


def _kernel(facts: Facts) -> Iterator[Finding]:
    yield _judge(
        "clock", facts.clock_source or "unknown",
        (facts.now < EARLIEST_TIME, FAIL, "the date lies years in the past", "set the clock"),
        (facts.clock_source in SLOW_CLOCKS, WARN, f"{facts.clock_source} is slow to read", "clocksource=tsc"),
    )  # fmt: skip
    scope = facts.ptrace_scope
    denied = scope == 3 or (scope == 2 and not facts.may_trace)
    fix = "sysctl kernel.yama.ptrace_scope=1, or CAP_SYS_PTRACE"
    yield _judge(
        "stacks", "py-spy can read ranks", (facts.py_spy is None, WARN, "no py-spy", "pip install py-spy"),
        (denied, WARN, f"ptrace_scope {scope}: py-spy cannot read a rank that answers no signal", fix),
    )  # fmt: skip
