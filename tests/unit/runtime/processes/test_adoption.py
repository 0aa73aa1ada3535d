"""Adoption of orphans, in a process of its own: it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROLOGUE = """
import ctypes, os, subprocess, sys, time
from grpo_run.runtime.processes import adoption
from grpo_run.runtime.processes.adoption import Reaper, adopt_orphans
from grpo_run.watchdog.processes import read_children, read_state
def orphan(seconds, session=True):
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        if session:
            os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(seconds)
        os._exit(0)
    os.waitpid(middle, 0)
    return int(os.read(read, 20))
def until(holds):
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def run(body: str) -> None:
    """Run a program; its assertions are the test's."""
    ran = subprocess.run(
        [sys.executable, "-c", PROLOGUE + body], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_an_orphan_is_adopted_and_reaped() -> None:
    """Also in a session of its own. Its exit leaves no zombie."""
    run(
        "assert adopt_orphans()\n"
        "pid = orphan(0.2)\n"
        "assert read_children(os.getpid()) == [pid]\n"
        "until(lambda: read_state(pid) == 'Z')\n"
        "Reaper(lambda: set()).reap()\n"
        "assert read_children(os.getpid()) == []\n"
    )


def test_the_exit_codes_of_others_are_left_alone() -> None:
    """A child of our own session is waited for by whoever started it, unless nobody does so for a minute."""
    run(
        "adopt_orphans()\n"
        "own = subprocess.Popen(['sh', '-c', 'exit 3'])\n"
        "leader = subprocess.Popen(['sh', '-c', 'exit 4'], start_new_session=True)\n"
        "lost = orphan(0.0, session=False)\n"
        "until(lambda: {read_state(pid) for pid in (own.pid, leader.pid, lost)} == {'Z'})\n"
        "now = 0.0\n"
        "reaper = Reaper(lambda: {leader.pid}, clock=lambda: now)\n"
        "reaper.reap()\n"
        "assert own.wait() == 3 and leader.wait() == 4\n"
        "assert read_children(os.getpid()) == [lost]\n"
        "now = 61.0\n"
        "reaper.reap()\n"
        "assert read_children(os.getpid()) == []\n"
    )


@pytest.mark.parametrize(
    "before", ["child = subprocess.Popen(['sleep', '5'])", "os.getpid = lambda: 1", "ctypes.CDLL = Refuses"]
)
def test_adoption_proves_nothing_if_others_may_be_adopted_too(before: str) -> None:
    """With a child from before, as pid 1 of a container, or where the kernel refuses."""
    run(
        "class Refuses:\n"
        "    def __init__(self, *arguments, **options): pass\n"
        "    def prctl(self, *arguments): return -1\n"
        "child = None\n"
        f"{before}\n"
        "try:\n"
        "    assert not adopt_orphans()\n"
        "finally:\n"
        "    child and child.kill()\n"
    )


def test_children_are_found_in_a_kernel_that_does_not_list_them() -> None:
    """CONFIG_PROC_CHILDREN is an option."""
    run(
        "from grpo_run.watchdog import processes\n"
        "read = processes.read_file\n"
        "processes.read_file = lambda path: None if path.endswith('children') else read(path)\n"
        "child = subprocess.Popen(['sleep', '5'])\n"
        "assert read_children(os.getpid()) == [child.pid]\n"
        "child.kill()\n"
    )


def test_an_abandoned_child_is_our_own_until_it_exits_and_is_then_reaped() -> None:
    """On a disk that hangs it survives SIGKILL; it is no process of the ranks, although orphans are
    adopted.
    """
    run(
        "import multiprocessing, signal\nfrom grpo_run.watchdog.run_processes.ownership import"
        " RunProcesses\nfrom grpo_run.watchdog.processes import read_processes\nassert"
        " adopt_orphans()\nown = adoption.own_children\nowned = RunProcesses(os.getpid(), os.getsid(0),"
        " started_by_supervisor=own, adopts_only_ours=True)\nchild ="
        " multiprocessing.get_context('fork').Process(target=lambda: (os.setsid(), time.sleep(600)),"
        " daemon=True)\nchild.start()\nuntil(lambda: os.getsid(child.pid) == child.pid)\nchild.kill = lambda:"
        " None\nadoption.abandon(child)\nassert child not in multiprocessing.active_children()\nassert own()"
        " == {child.pid} and owned.find(read_processes()) == {}\nReaper(own).reap()\nos.kill(child.pid,"
        " signal.SIGKILL)\nuntil(lambda: read_state(child.pid) == 'Z')\nassert own() =="
        " set()\nReaper(own).reap()\nassert read_children(os.getpid()) == []\n"
    )
