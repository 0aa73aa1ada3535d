"""The hosts that the tests of this folder run on are apart, and nothing of them stays."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
from support.hosts import Host, hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def _reaches(source: Host, name: str, *, within_seconds: float = 10.0) -> bool:
    """Whether the other host answers; one that was away may be looked for again first."""
    deadline = time.monotonic() + within_seconds
    while not (answers := _answers(source, name)) and time.monotonic() < deadline:
        pass
    return answers


def _answers(source: Host, name: str) -> bool:
    code = f"import socket; socket.create_connection(({name!r}, 9), 0.5)"
    done = subprocess.run([*source.enter, "python3", "-c", code], capture_output=True, text=True)
    return "refused" in done.stderr  # an answer of the other host, on which nothing listens


def test_hosts_are_apart_and_gone_afterwards(tmp_path: Path) -> None:
    """Names, links, memory, disks and processes are each host's own; a link can be cut, a host come back."""
    links = set(socket.if_nameindex())
    with hosts(tmp_path, 2) as (one, two):
        assert subprocess.check_output([*two.enter, "hostname"], text=True) == "node1\n"
        assert _reaches(one, "node1")
        assert _reaches(two, "node0")
        one.call("touch", "/dev/shm/mine", str(one.disk / "mine"), str(tmp_path / "shared"))
        two.call(
            "sh", "-c", f"test ! -e /dev/shm/mine && test ! -e {two.disk}/mine && test -e {tmp_path}/shared"
        )
        assert subprocess.check_output([*one.enter, "sh", "-c", "ls -d /proc/[0-9]* | wc -l"]) <= b"6"
        two.cut()
        assert not _answers(one, "node1")
        two.join()
        assert _reaches(one, "node1")
        two.kill()
        assert not _answers(one, "node1")
        two.boot()
        assert _reaches(one, "node1")
    assert set(socket.if_nameindex()) == links
    assert not any(str(tmp_path) in line for line in Path("/proc/mounts").read_text().splitlines())
