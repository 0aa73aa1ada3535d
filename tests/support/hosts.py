"""Hosts of their own on one machine, for runs over several: `with hosts(folder, 2) as (one, two): ...`.

A host is a set of namespaces: network with an address, names, processes, shared memory, IPC and mounts. It
has `/etc/hosts`, `/dev/shm`, claims and a disk (`Host.disk`) of its own; the rest of the file system is
shared. Hosts are connected by a bridge in a network namespace of its own, so nothing of the machine's network
changes, and all of it is gone with its processes. Making them takes root, unshare, nsenter and ip: see
`missing()`.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_run.runtime import claims
from support import warm
from support.runs import BIN, Run

PORT = 29500
MADE_SECONDS = 10.0
TRY = (
    "mount -t tmpfs none /mnt && ip link add port0 type veth peer name port1"
    " && ip link add bridge0 type bridge"
)
WAITS = "trap '' CHLD; exec sleep infinity"
"""A first process that keeps namespaces; ignored SIGCHLD lets the kernel reap its orphans."""
PREPARE = """set -e
hostname {name}
mount -t tmpfs -o size=256m shm /dev/shm
mount -t tmpfs -o size=512m disk {disk}
mkdir -p -m 1777 {claims}
mount -t tmpfs -o mode=1777 claims {claims}
mount --bind {names} /etc/hosts
mount --bind {services} /etc/nsswitch.conf
ip link set lo up
touch {disk}/.ready
"""


@functools.cache
def missing() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c",
         TRY],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


def _call(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, (command, done.stderr)


class Host:
    """One host. It is up when made.

    Args:
        folder: shared by all hosts.
        switch: pid of the process that keeps the network which connects them.
        number: of this host, from 0; its name is `node<number>`.
    """

    def __init__(self, folder: Path, switch: int, number: int) -> None:
        self.name, self.address = f"node{number}", f"10.77.0.{number + 1}"
        self.disk = folder / "disk"
        self._folder, self._switch, self._number = folder, switch, number
        self._first: subprocess.Popen[bytes] | None = None
        self.boot()

    def boot(self) -> None:
        """Bring the host up, with an empty disk and an empty `/dev/shm`."""
        self.disk.mkdir(exist_ok=True)
        script = PREPARE.format(
            name=self.name,
            disk=self.disk,
            names=self._folder / "hosts",
            claims=claims.FOLDER,
            services=self._folder / "nsswitch.conf",
        )
        self._first = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc",
             "--kill-child", "sh", "-c", script + WAITS],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._await(lambda: self._exists(self.disk / ".ready"), "its mounts")
        plug = f"port{self._number}"
        # a host that comes back has the same address on the wire
        self._on_switch("link", "add", plug, "type", "veth", "peer", "name", "eth0", "address",
                        f"02:00:00:00:00:{self._number:02}", "netns", str(self.pid))  # fmt: skip
        self._on_switch("link", "set", plug, "master", "bridge0", "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "eth0", "up")

    @property
    def pid(self) -> int:
        """The host's first process, as the machine counts."""
        assert self._first is not None, f"{self.name} is down"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self._await(lambda: bool(children.read_text().split()), "its first process")
        return int(children.read_text().split()[0])

    def _exists(self, path: Path) -> bool:
        return Path(f"/proc/{self.pid}/root{path}").exists()

    def _await(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + MADE_SECONDS
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"{self.name} has not got {what}"
            time.sleep(0.01)

    def _on_switch(self, *arguments: str, check: bool = True) -> None:
        _call("nsenter", "--target", str(self._switch), "--net", "ip", *arguments, check=check)

    @property
    def enter(self) -> tuple[str, ...]:
        """The command that runs another one on this host."""
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return ("nsenter", "--target", str(self.pid), *spaces, f"--wdns={self._folder}")

    def call(self, *command: str) -> None:
        """Run a command on this host; it must succeed."""
        _call(*self.enter, *command)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process that the host knows under this pid."""
        self.call("kill", f"-{int(number)}", str(pid))

    def kill(self) -> None:
        """Let the host vanish: first its link, so that nobody hears its connections close, then all
        processes.
        """
        if self._first is None:
            return
        self._on_switch("link", "delete", f"port{self._number}", check=False)
        self._first.kill()
        self._first.wait()
        self._first = None

    def cut(self) -> None:
        """Drop whatever the host sends or is sent; no side is told."""
        self._on_switch("link", "set", f"port{self._number}", "nomaster")

    def join(self) -> None:
        """End the cut."""
        self._on_switch("link", "set", f"port{self._number}", "master", "bridge0")


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    """Make hosts that share a folder; nothing is left of them afterwards.

    Args:
        folder: shared by all; the hosts' own disks are mounted in it.
        count: of hosts.
    """
    names = "".join(f"10.77.0.{number + 1} node{number}\n" for number in range(count))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    # no name server can be reached: torch would wait for one at each connection
    (folder / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
    switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
    made: list[Host] = []
    try:
        deadline = time.monotonic() + MADE_SECONDS
        while os.readlink(f"/proc/{switch.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline, "no network"
            time.sleep(0.01)
        _call(
            "nsenter", "--target", str(switch.pid), "--net", "ip", "link", "add", "bridge0", "type", "bridge"
        )
        _call("nsenter", "--target", str(switch.pid), "--net", "ip", "link", "set", "bridge0", "up")
        for number in range(count):
            made.append(Host(folder, switch.pid, number))
        yield made
    finally:
        for host in made:
            host.kill()
        switch.kill()
        switch.wait()


class HostRun(Run):
    """The part of a run on one host, with a run directory of its own.

    Args:
        host: where the supervisor runs.
        nodes: `--nnodes`.
        script: with its arguments.
        options: further ones of `grpo-run launch`.
        endpoint: the host where all meet.
    """

    def __init__(
        self,
        host: Host,
        folder: Path,
        *script: str,
        nodes: str = "2",
        options: Sequence[str] = (),
        endpoint: str = "node0",
    ) -> None:
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{endpoint}:{PORT}", "--rdzv-id", "pair")
        super().__init__(
            folder,
            ["--run-id", "pair", "--nnodes", nodes, *rendezvous, "--nproc-per-node", "1", *options, *script],
            name=f"run-{host.name}", cold=False, environment={"TMPDIR": str(host.disk)},
        )  # fmt: skip
        self.host = host

    def start(self, output: int | None = None) -> HostRun:
        """Start the supervisor on the host."""
        if warm.always_cold:
            self.program = (*self.host.enter, str(BIN / "grpo-run"))
        self.inside = self.host.pid
        super().start(output)
        return self

    def start_as_spare(self) -> None:
        """Start the supervisor, and wait until it knows that the others have all ranks."""
        self.start().until(lambda events: "as a spare" in self.printed())

    def kill(self, rank: int, number: int = 9) -> None:
        """Send a rank of this host a signal."""
        self.host.signal(self.pid(rank), number)

    def kill_supervisor(self, number: int = 9) -> None:
        """Send the supervisor a signal."""
        self.host.signal(self.events("run_started")[-1]["supervisor_pid"], number)


def start_all(runs: Sequence[HostRun], step: int = 6, *, timeout_seconds: float = 60.0) -> None:
    """Start the supervisors of all hosts, and wait until this step is committed everywhere."""
    for run in runs:
        run.start()
    for run in runs:
        run.until_step(step, timeout_seconds=timeout_seconds)
