"""A forkserver that does not answer is replaced by one that imports nothing; a stopped one is continued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import freezer

TESTS = Path(__file__).resolve().parents[1]


def run(program: str, folder: Path, library: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can import a module `slow_lib` of this content, and what supports the tests."""
    (folder / "slow_lib.py").write_text(library)
    path = os.pathsep.join(filter(None, [str(folder), str(TESTS), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-P", "-c", program], env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


PROGRAM = """
import os, sys
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.upstream import process_names as upstream

said = []
forkserver.await_server(said.append)
assert said == [] and upstream.forkserver_pid() is None  # no server, nothing to wait for
forkserver.start_server(["slow_lib"], {"TOKEN": "x"})
first = upstream.forkserver_pid()
forkserver.await_server(said.append, idle_seconds=1.5, total_seconds=float(os.environ["TOTAL"]))
forkserver.await_server(said.append)
process = forkserver.start_child("posix:getpid", dict(os.environ), "/")
process.join(30)
print(said, process.exitcode, upstream.forkserver_pid() == first)
assert b"TOKEN=x" in open(f"/proc/{upstream.forkserver_pid()}/environ", "rb").read()
"""


@pytest.mark.parametrize(
    ("library", "total", "expected"),
    [
        ("", "60", "[] 0 True"),
        ("raise ImportError", "60", "[] 0 True"),
        (
            "import time; time.sleep(600)",
            "60",
            "did nothing for 2 s: ranks start as fresh interpreters'] 0 False",
        ),
        ("while True: pass", "2", "took more than 2 s: ranks start as fresh interpreters'] 0 False"),
        ("import os; os._exit(3)", "60", "has exited: ranks start as fresh interpreters'] 0 False"),
        pytest.param(
            "import os; os.kill(os.getpid(), 11)",
            "60",
            "has exited: ranks start as fresh interpreters'] 0 False",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_server_that_hangs_or_ends_in_an_import_is_replaced(
    tmp_path: Path, library: str, total: str, expected: str
) -> None:
    """A rank can be started in every case."""
    done = run(PROGRAM, tmp_path, library, TOTAL=total)
    assert done.stdout.strip().endswith(expected), (done.stdout, done.stderr)


FROZEN = """
import os, sys, time
from support.freezer import freezer
from grpo_run.runtime.processes import adoption, forkserver
from grpo_run.runtime.upstream import process_names as upstream

said = []
with freezer() as cgroup:
    forkserver.start_server(["slow_lib"], {})
    first = upstream.forkserver_pid()
    cgroup.freeze(first)
    forkserver.END_SECONDS = 1.0
    forkserver.await_server(said.append, idle_seconds=0.5)
    process = forkserver.start_child("posix:getpid", dict(os.environ), "/")
    process.join(30)
    print(said, process.exitcode, upstream.forkserver_pid() == first, first in adoption.own_children())
"""


def test_a_server_that_survives_sigkill_is_abandoned(tmp_path: Path) -> None:
    """Ranks start from another one, and the end of the run does not wait for it as for a helper of theirs."""
    if reason := freezer.unsupported():
        pytest.skip(reason)
    expected = "did nothing for 0 s: ranks start as fresh interpreters'] 0 False True"
    done = run(FROZEN, tmp_path, "import time; time.sleep(600)")
    assert done.stdout.strip().endswith(expected), (done.stdout, done.stderr)


STOPPED = """
import os, signal, sys, time
from pathlib import Path
from grpo_run.runtime.upstream import process_names as upstream
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.ranks import RankGroup, RankSpec
from grpo_run.watchdog.processes import read_stat

def stop():
    os.kill(upstream.forkserver_pid(), signal.SIGSTOP)
    while read_stat(upstream.forkserver_pid()).state != "T":
        time.sleep(0.01)

forkserver.start_server([], {})
stop()
forkserver.await_server(print)
stop()
spec = RankSpec(rank=0, environment=dict(os.environ), log=Path("/dev/null"))
group = RankGroup([spec], entry="signal:pause", preloaded=True)
stop()
os.kill(group.pids[0], signal.SIGKILL)
exits = group.wait(10.0)
print([exit.signal for exit in exits])
"""


def test_a_stopped_server_is_continued_before_it_is_needed(tmp_path: Path) -> None:
    """Ctrl-Z and schedulers stop it beside the supervisor, which may be the only one that is continued."""
    done = run(STOPPED, tmp_path, "")
    assert done.stdout.strip() == "[9]", (done.stdout, done.stderr)
