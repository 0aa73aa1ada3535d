"""Process trees of real processes: helpers in sessions of their own belong to them, strangers do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from grpo_run.runtime.processes.usage import find_process_trees, read_threads, read_tree_usage

RANK = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import subprocess, time; "
    "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); time.sleep(60)"],
    start_new_session=True, stdout=subprocess.PIPE, text=True)
plain = subprocess.Popen(["sleep", "60"])
print(plain.pid, inner.pid, inner.stdout.readline().strip(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], tuple[int, list[int]]]]:
    """Start a session leader that prints the ids of its helpers; kill all of them at the end."""
    started: list[tuple[subprocess.Popen[str], list[int]]] = []

    def run(program: str) -> tuple[int, list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        helpers = [int(word) for word in process.stdout.readline().split()]
        started.append((process, helpers))
        return process.pid, helpers

    yield run
    for process, helpers in started:
        for pid in (process.pid, *helpers):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate()


def test_helpers_in_sessions_of_their_own_belong_to_the_process_tree(
    start: Callable[[str], tuple[int, list[int]]],
) -> None:
    """Also those that a helper has started; another rank's are its own."""
    first, helpers = start(RANK)
    second, others = start(RANK)
    trees = find_process_trees([first, second])
    assert set(trees[first]) == {first, *helpers}
    assert set(trees[second]) == {second, *others}


def test_the_cpu_time_of_children_that_have_exited_counts(
    start: Callable[[str], tuple[int, list[int]]],
) -> None:
    """Otherwise the sum would fall when a helper ends, and its work would go unseen."""
    pid, _ = start(
        "import os, subprocess, sys, time\n"
        "subprocess.run([sys.executable, '-c', 'import time; end = time.process_time() + 0.3\\n"
        "while time.process_time() < end: pass'])\n"
        "print(flush=True)\ntime.sleep(60)"
    )
    usage = read_tree_usage(find_process_trees([pid])[pid])
    assert usage is not None
    assert usage.members == {pid}
    assert usage.cpu_seconds >= 0.25


def test_threads_are_read_with_name_and_state(start: Callable[[str], tuple[int, list[int]]]) -> None:
    """A stopped process has no thread that is not stopped."""
    pid, _ = start("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"  # noqa: E501
                   "print(flush=True)\ntime.sleep(60)")  # fmt: skip
    threads = read_threads([pid])
    assert threads is not None
    assert len(threads) == 2
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        threads = read_threads([pid])
        if threads and all(thread.state == "T" for thread in threads.values()):
            return
        time.sleep(0.01)
    pytest.fail(f"not stopped: {threads}")


def test_a_process_tree_that_has_exited_is_unknown() -> None:
    """It is not a process tree that does nothing."""
    process = subprocess.Popen(["true"])
    process.wait()
    assert read_tree_usage([process.pid]) is None
    assert read_threads([process.pid]) == {}
