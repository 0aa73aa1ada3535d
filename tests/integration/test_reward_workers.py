"""Workers as real processes: what a reward function can do to one, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from grpo_run.runtime.features.reward_workers import _host as hosts
from grpo_run.runtime.features.reward_workers import _packing as packing
from grpo_run.runtime.features.reward_workers._deadlines import CallClock, Learned
from grpo_run.runtime.features.reward_workers._messages import Reply, Task
from grpo_run.runtime.features.reward_workers._pool import WorkerPool
from grpo_run.runtime.features.reward_workers.events import FailureKind
from grpo_run.runtime.rank.generators import read_generators
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

PROMPTS = ["a", "bb", "ccc"]


class Workers:
    """A pool of one worker, and functions by the order in which they are called first."""

    def __init__(self, memory_limit_bytes: int = 400 * 2**20) -> None:
        import torch  # noqa: F401 - the states of its generators travel with each call

        self.host = hosts.start()
        self.pool = WorkerPool(self.host, size=1, memory_limit_bytes=memory_limit_bytes)
        self.pool.prepare(frozenset({"numpy"}))
        self._keys: dict[Any, int] = {}

    def call(
        self,
        function: Callable[..., Any],
        seconds: float = 30.0,
        settings: DeadlineSettings = DeadlineSettings(),  # noqa: B008 - frozen
        **columns: Any,
    ) -> Reply:
        key = self._keys.setdefault(function, len(self._keys))
        arguments = packing.pack_arguments({"prompts": PROMPTS, "log_metric": None, **columns})
        content = packing.pack_function(function).content
        task = Task(key=key, function=content, arguments=arguments, generators=read_generators())
        return self.pool.call(task, CallClock(Learned(settings, None), seconds))


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    below = {process.pid for process in psutil.Process(made.host.pid).children(recursive=True)}
    yield made
    below |= {process.pid for process in psutil.Process(made.host.pid).children(recursive=True)}
    made.pool.close()
    deadline = time.monotonic() + 10
    while (
        left := [pid for pid in {*below, made.host.pid} if psutil.pid_exists(pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def lengths(prompts: list[str], **columns: Any) -> list[int]:
    return [len(prompt) for prompt in prompts]


def tells_its_pid(prompts: list[str], **columns: Any) -> list[int]:
    return [os.getpid() for _ in prompts]


def blocks_signals(prompts: list[str], **columns: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    time.sleep(1e6)


def holds_the_gil(prompts: list[str], **columns: Any) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def takes_memory(prompts: list[str], **columns: Any) -> None:
    kept = []
    while True:
        kept.append(os.urandom(2**20))


def dies(prompts: list[str], **columns: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (blocks_signals, FailureKind.timeout, "did not return within 0.5 s"),
        (holds_the_gil, FailureKind.timeout, "did not return within 0.5 s"),
        (takes_memory, FailureKind.memory, "used .* GiB of memory, more than the limit of 0.4 GiB"),
        (dies, FailureKind.died, "ended its worker process by SIGSEGV"),
    ],
)
def test_a_function_that_misbehaves_costs_its_call_only(
    workers: Workers, function: Any, kind: FailureKind, message: str
) -> None:
    reply = workers.call(function, 0.5 if kind is FailureKind.timeout else 30.0)
    assert reply.failure is not None
    assert reply.failure.kind is kind
    assert re.match(message, reply.failure.message)
    assert workers.call(lengths).values == [1, 2, 3]


def test_a_worker_that_reads_nothing_is_ended_at_the_deadline(workers: Workers) -> None:
    """The rank does not wait for it to take a large batch."""

    values = workers.call(tells_its_pid).values
    assert values is not None
    os.kill(values[0], signal.SIGSTOP)
    failure = workers.call(lengths, 0.5, answer=["x" * 2**24] * 3).failure
    assert failure is not None
    assert failure.kind is FailureKind.timeout
    assert workers.call(lengths).values == [1, 2, 3]


def test_a_rank_without_descriptors_does_not_blame_the_function(workers: Workers) -> None:
    """The function then stays in the rank."""
    workers.call(lengths)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            workers.call(lengths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert workers.call(lengths).values == [1, 2, 3]


def test_a_function_that_holds_the_interpreter_is_ended_long_before_its_deadline(workers: Workers) -> None:
    failure = workers.call(
        holds_the_gil, 60.0, DeadlineSettings(floor_seconds=4, first_floor_seconds=4)
    ).failure
    assert failure is not None
    assert failure.message == "held the interpreter for 3.2 s"


def test_functions_may_start_pools_of_processes_with_helpers_of_the_same_name(workers: Workers) -> None:
    """Pools find helpers by name, in `__main__`; each function has brought its own copies."""
    source = (
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def judge(prompt): return len(prompt)\n"
        "def {name}(prompts, **columns):\n"
        "    with ProcessPoolExecutor(1) as pool: return list(pool.map(judge, prompts))\n"
    )
    for name in ("first", "second", "first"):
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(source.format(name=name), space)  # noqa: S102 - as a script is run
        assert workers.call(space[name]).values == [1, 2, 3]


def test_processes_that_a_function_leaves_are_ended_with_its_worker(workers: Workers) -> None:
    """Also one that has left its session and its parent, and one that ignores SIGTERM."""
    workers.pool.refresh()

    def leaves(prompts: list[str], **columns: Any) -> list[int]:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            orphan = os.fork()
            if orphan:
                os.write(write, str(orphan).encode())
                os._exit(0)
            time.sleep(1000)
        return [child.pid, int(os.read(read, 20)), 0]

    reply = workers.call(leaves)
    assert reply.values is not None
    pids = reply.values[:2]
    assert all(psutil.pid_exists(pid) for pid in pids)
    workers.pool.refresh()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_collects_processes_is_replaced(workers: Workers) -> None:
    def forks(prompts: list[str], **columns: Any) -> list[int]:
        for _ in range(5):
            if os.fork() == 0:
                time.sleep(1000)
        return [0, 0, 0]

    workers.pool.refresh()
    before = workers.call(tells_its_pid).values
    for expected in (before, before, None):
        values = workers.call(tells_its_pid).values
        assert (values == before) is (expected is not None)
        workers.call(forks)
