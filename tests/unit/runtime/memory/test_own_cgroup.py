"""A cgroup for the ranks: made where the kernel lets us, left alone where it does not, and removed at the
end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import memory_cgroups
from support.memory_cgroups import memory_cgroup

from grpo_run.runtime.memory.host_cgroup import OwnCgroup, remove_cgroup

PROGRAM = """
import os, subprocess, sys
from grpo_run.runtime.memory.host_cgroup import OwnCgroup
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
own = OwnCgroup.make()
child = subprocess.Popen(["sleep", "60"])
own.enter(child.pid)
print(own.folder, child.pid, flush=True)
sys.stdin.readline()
if sys.argv[2] == "remove":
    own.remove()
child.kill()
child.wait()
"""


@pytest.mark.skipif(memory_cgroups.missing() is not None, reason=str(memory_cgroups.missing()))
def test_ranks_are_accounted_in_a_group_of_their_own() -> None:
    """Below the supervisor's, without the supervisor in it; at the end what is still in it moves up, and it
    is gone.
    """
    with memory_cgroup(512 << 20) as group:
        command = [sys.executable, "-P", "-c", PROGRAM, str(group.folder), "remove"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            name, child = process.stdout.readline().split()
            folder = Path(name)
            assert folder == group.folder / f"grpo-run-{process.pid}"
            assert (folder / "cgroup.procs").read_text().split() == [child]
            abandoned = group.folder / "grpo-run-99999999"
            abandoned.mkdir()
            process.communicate("\n", timeout=30)
        assert not folder.exists()
        assert not abandoned.exists()


@pytest.mark.skipif(memory_cgroups.missing() is not None, reason=str(memory_cgroups.missing()))
def test_the_group_of_a_dead_supervisor_is_removed_by_its_path() -> None:
    """By the guardian, once the ranks are dead."""
    with memory_cgroup(512 << 20) as group:
        command = [sys.executable, "-P", "-c", PROGRAM, str(group.folder), "keep"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            printed, _ = process.communicate("\n", timeout=30)
        folder = Path(printed.split()[0])
        assert folder.exists()
        remove_cgroup(folder)
        assert not folder.exists()


def test_nothing_is_made_where_there_is_no_memory_cgroup(tmp_path: Path) -> None:
    """A machine without cgroups, or another layout: every operation does nothing."""
    own = OwnCgroup.make(tmp_path)
    assert own.folder is None
    own.enter(os.getpid())
    own.remove()
    assert list(tmp_path.iterdir()) == []
