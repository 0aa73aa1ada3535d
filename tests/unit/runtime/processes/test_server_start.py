"""A forkserver that does not answer is replaced by one that imports nothing, and the user is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from grpo_run.runtime.processes import forkserver, server_start
from grpo_run.runtime import upstream

said = []
server_start.await_server(said.append)
assert said == [] and upstream.forkserver_pid() is None  # no server, nothing to wait for
forkserver.start_server(["slow_lib"], {"TOKEN": "x"})
first = upstream.forkserver_pid()
server_start.await_server(said.append, server_start.Limits(idle_seconds=1.5, total_seconds=float(os.environ["TOTAL"])))
server_start.await_server(said.append)
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
        (
            "import os; os.kill(os.getpid(), 11)",
            "60",
            "has exited: ranks start as fresh interpreters'] 0 False",
        ),
    ],
)
def test_a_server_that_hangs_or_ends_in_an_import_is_replaced(
    tmp_path: Path, library: str, total: str, expected: str
) -> None:
    """A rank can be started in every case."""
    (tmp_path / "slow_lib.py").write_text(library)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path, "TOTAL": total},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith(expected), (done.stdout, done.stderr)
