"""A Slurm cluster on hosts of namespaces: `with cluster(folder, 2) as slurm: slurm.submit("job.sbatch")`.

Real daemons of Slurm and munge: one slurmd on each host, and a slurmctld on a further one, so that no host of
a job takes the controller with it. Keys, configuration, state and logs are below the folder; nothing of the
machine's is read or changed. There are two partitions: a job in `urgent` takes the hosts of one in `normal`,
which is requeued. Times are Slurm's defaults but for those that a test would only wait for: a host is down
after `DOWN_SECONDS`, and a requeued job may start after `REQUEUED_SECONDS` instead of 120.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support import hosts
from support.runs import BIN, Run
from support.warm import QUIET

UP_SECONDS = 60.0
GPUS = 2
"""Of a host, as far as Slurm knows: files that nobody opens."""
DOWN_SECONDS = 15
REQUEUED_SECONDS = 5
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONFIGURATION = """ClusterName=tests
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={disk}/munge.socket,cred_expire={requeued}
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={disk}/slurmd
SlurmdPidFile={disk}/slurmd.pid
SlurmdLogFile={folder}/%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdTimeout={down}
SlurmctldTimeout=60
MinJobAge=3600
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT Nodes=ALL MaxTime=2-00:00:00
PartitionName=normal Default=YES PriorityTier=1
PartitionName=urgent PriorityTier=2
{extra}
"""
NODE = "NodeName={0.name} NodeAddr={0.address} CPUs=2 RealMemory=2048 Gres=gpu:{1}\n"
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={disk}/cgroup\n"
FREEZER = Path("/sys/fs/cgroup/freezer")
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


@functools.cache
def missing() -> str:
    """Return why there can be no cluster here; empty if there can."""
    for program in PROGRAMS:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"{program} is not installed (slurm-wlm, munge)"
    return "Slurm's daemons need root" if os.geteuid() else hosts.missing()


def _removed(cgroup: Path) -> None:
    """Remove a cgroup once its processes, which were killed, are gone."""
    deadline = time.monotonic() + UP_SECONDS
    while cgroup.exists():
        assert time.monotonic() < deadline, (cgroup / "cgroup.procs").read_text()
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        time.sleep(0.01)


class Job:
    """A job of the cluster."""

    def __init__(self, slurm: Cluster, number: int) -> None:
        self.slurm, self.number = slurm, number

    def shown(self) -> dict[str, str]:
        """Return what `scontrol show job` says of it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm.call("scontrol", "show", "job", str(self.number))))

    @property
    def state(self) -> str:
        """Slurm's word for its state."""
        return self.shown()["JobState"]

    @property
    def restarts(self) -> int:
        """How often it was requeued."""
        return int(self.shown()["Restarts"])

    @property
    def output(self) -> Path:
        """What it has printed."""
        return Path(self.shown()["StdOut"])

    def printed(self) -> str:
        """Return what it has printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def until(self, condition: Callable[[Job], object], timeout_seconds: float = 120.0) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + timeout_seconds
        while not condition(self):
            assert time.monotonic() < deadline, f"{self.shown()}\n{self.printed()[-6000:]}"
            time.sleep(0.2)

    def until_printed(self, text: str, *, count: int = 1, timeout_seconds: float = 120.0) -> None:
        """Wait until the job has printed this so often."""
        self.until(lambda job: job.printed().count(text) >= count, timeout_seconds)

    def until_state(self, *states: str, timeout_seconds: float = 120.0) -> None:
        """Wait for one of these states."""
        self.until(lambda job: job.state in states, timeout_seconds)

    def ended(self, state: str = "COMPLETED", *, timeout_seconds: float = 240.0) -> dict[str, str]:
        """Wait for the job's end, which must be this one; return what Slurm says of it."""
        self.until(lambda job: job.state in ENDED, timeout_seconds)
        shown = self.shown()
        assert shown["JobState"] == state, f"{shown}\n{self.printed()[-6000:]}"
        return shown

    def cancel(self, *options: str) -> None:
        """`scancel`."""
        self.slurm.call("scancel", *options, str(self.number))

    def requeue(self) -> None:
        """`scontrol requeue`."""
        self.slurm.call("scontrol", "requeue", str(self.number))


class Cluster:
    """The daemons of a cluster. `nodes` are the hosts that jobs run on.

    Args:
        folder: shared by the hosts; jobs run in it.
        made: the hosts; the last one is the controller's.
        proctrack: how Slurm knows a step's processes.
        extra: further lines of slurm.conf.
    """

    def __init__(self, folder: Path, made: Sequence[hosts.Host], *, proctrack: str, extra: str) -> None:
        self.folder, self.nodes, self._controller = folder, list(made[:-1]), made[-1]
        self._own = folder / "slurm"
        self._daemons: list[subprocess.Popen[bytes]] = []
        (self._own / "state").mkdir(parents=True)
        key = self._own / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._key = key
        text = CONFIGURATION.format(
            controller=self._controller, disk=made[0].disk, folder=self._own, proctrack=proctrack,
            requeued=REQUEUED_SECONDS, down=DOWN_SECONDS, extra=extra,
        )  # fmt: skip
        self._cgroup = f"slurm-{os.getpid()}-{id(self):x}"
        (self._own / "cgroup.conf").write_text(CGROUPS.format(disk=made[0].disk))
        for number in range(GPUS):
            (self._own / f"gpu{number}").touch()
        (self._own / "gres.conf").write_text(f"Name=gpu File={self._own}/gpu[0-{GPUS - 1}]\n")
        (self._own / "slurm.conf").write_text(text + "".join(NODE.format(host, GPUS) for host in self.nodes))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}, **QUIET,
            "SLURM_CONF": str(self._own / "slurm.conf"), "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin",
            "TMPDIR": str(made[0].disk),
        }  # fmt: skip

    def start(self) -> None:
        """Start all daemons, and wait until jobs can be run."""
        self._munge(self._controller)
        self._daemon(self._controller, "slurmctld", "-D", "-i")
        for host in self.nodes:
            self.start_host(host)
        self.until_idle(*self.nodes)

    def start_host(self, host: hosts.Host) -> None:
        """Start what a host of the cluster starts when it boots."""
        own = FREEZER / self._cgroup / host.name
        own.mkdir(parents=True, exist_ok=True)
        seen_as = host.disk / "cgroup" / "freezer"
        host.call("sh", "-c", f"mkdir -p {seen_as} && mount --bind {own} {seen_as}")
        self._munge(host)
        self._daemon(host, "slurmd", "-D")

    def until_idle(self, *nodes: hosts.Host) -> None:
        """Wait until these hosts can take jobs."""
        deadline = time.monotonic() + UP_SECONDS
        while True:
            shown = self.call(
                "sinfo", "--noheader", "--Node", "--format=%n %T", "--partition=normal", check=False
            )
            states = dict(line.split() for line in shown.splitlines() if len(line.split()) == 2)
            if all(states.get(host.name) == "idle" for host in nodes):
                return
            assert time.monotonic() < deadline, (shown, self.logs())
            time.sleep(0.3)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"{file.name}:\n{file.read_text()[-1500:]}" for file in sorted(self._own.glob("*.log"))
        )

    def _munge(self, host: hosts.Host) -> None:
        socket = host.disk / "munge.socket"
        words = [
            "--force", "--foreground", f"--key-file={self._key}", f"--socket={socket}",
            f"--pid-file={host.disk}/munge.pid", f"--seed-file={host.disk}/munge.seed",
        ]  # fmt: skip
        self._daemon(host, "munged", *words)
        deadline = time.monotonic() + UP_SECONDS
        while not Path(f"/proc/{host.pid}/root{socket}").exists():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def _daemon(self, host: hosts.Host, *command: str) -> None:
        with open(self._own / f"{host.name}-{command[0]}.out.log", "ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*host.enter, *command], env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )  # fmt: skip

    def call(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm on the controller's host and return what it prints."""
        done = subprocess.run(
            [*self._controller.enter, *command], env=self.environment, cwd=self.folder, capture_output=True,
            text=True, stdin=subprocess.DEVNULL, timeout=UP_SECONDS,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr, self.logs())
        return done.stdout

    def submit(self, *words: str, environment: Mapping[str, str] | None = None) -> Job:
        """`sbatch` with these options, file and arguments."""
        given = [f"{name}={value}" for name, value in (environment or {}).items()]
        number = self.call("env", *given, "sbatch", "--parsable", *words)
        return Job(self, int(number.strip().partition(";")[0]))

    def run(self, host: hosts.Host | None = None) -> Run:
        """Return the only run of the jobs, to look at: its part on one host, if it is one of several."""
        pattern = "*" if host is None else f"*-{host.name}"
        deadline = time.monotonic() + UP_SECONDS
        while not (found := [path.parent for path in (self.folder / "runs").glob(f"{pattern}/run.json")]):
            assert time.monotonic() < deadline, "no run has begun"
            time.sleep(0.1)
        (directory,) = found
        return Run(self.folder, (), name=f"runs/{directory.name}")

    def stop(self) -> None:
        """End the daemons and the hosts with their jobs, and remove their cgroups."""
        for daemon in self._daemons:
            with contextlib.suppress(ProcessLookupError):
                daemon.kill()
            daemon.wait()
        for host in (*self.nodes, self._controller):
            host.kill()
        for folder in sorted((FREEZER / self._cgroup).glob("**/"), reverse=True):
            _removed(folder)


@contextmanager
def cluster(folder: Path, count: int, *, proctrack: str = "cgroup", extra: str = "") -> Iterator[Cluster]:
    """Make a cluster; nothing is left of it afterwards.

    Args:
        folder: shared by all hosts; jobs run in it.
        count: of hosts that run jobs.
        proctrack: how Slurm knows a step's processes.
        extra: further lines of slurm.conf.
    """
    with hosts.hosts(folder, count + 1) as made:
        slurm = Cluster(folder, made, proctrack=proctrack, extra=extra)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()
