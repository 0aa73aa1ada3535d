"""The processes that remain after the last line of every script, and whether they may wait for something
alive.

These are the ranks and what they have started (`ownership.py`); once no rank is left, without services and
without what the user keeps, which nobody waits for. They may wait for a process that a rank has started, or
for one outside the job that they are connected to.

Used by the detector of exit hangs and by the wait for helpers at the end of a run, about once in two seconds.
The supervisor and the processes that it started itself do not count. Reads /proc; judges nothing
(`watchdog/stalls/exit_hangs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_run.watchdog import processes
from grpo_run.watchdog.processes import ProcessStat, read_io_bytes
from grpo_run.watchdog.run_processes.connections import read_connections
from grpo_run.watchdog.run_processes.keeping import without_kept
from grpo_run.watchdog.run_processes.ownership import RunProcesses
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts, ProcessUsage

SERVICES = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
    "torch_shm_manager",
)
"""Parts of command lines of helpers that wait for the rank to exit; the rank does not wait for them."""
MAX_NAMED = 3
"""How many processes are named as what the ranks may wait for."""


class RemainingProcesses:
    """Observes the processes of one supervisor's ranks that remain.

    Args:
        owned: tells the run's processes from others.
        keep: patterns of `--keep`.
    """

    def __init__(self, owned: RunProcesses, *, keep: Sequence[str] = ()) -> None:
        self._owned = owned
        self._keep = keep
        self._connected = False

    def observe(self, pids: Mapping[int, int], *, connections: bool) -> ExitFacts | None:
        """Return the facts of now; None if a rank may not be read.

        Args:
            pids: the ranks that have not exited.
            connections: look at their connections too, which takes some milliseconds.

        Raises:
            OSError: /proc cannot be listed.
        """
        table = processes.read_processes()
        found = self._owned.find(table)
        ranks = set(pids.values())
        helpers = [one for pid, one in found.items() if pid not in ranks and not is_service(one)]
        own = list(found.values())
        if not ranks:
            own = [one for one in without_kept(found, self._keep).values() if not is_service(one)]
        if connections:
            pids_of_own = {process.pid for process in own}
            ours = processes.descendants(table, [self._owned.supervisor]) - pids_of_own
            # what the supervisor holds too was inherited from whoever started it
            found_now = read_connections({0: pids_of_own}, supervisor=ours)[0]
            self._connected = found_now is None or bool(found_now.outside)
        states = {rank: table[pid].state for rank, pid in pids.items() if pid in table}
        usage = {process.key: _usage(process) for process in own}
        for rank, pid in pids.items():
            if rank in states and states[rank] != "Z" and read_io_bytes(pid) is None:
                return None
        waited_for = helpers[:MAX_NAMED] if ranks else []
        return ExitFacts(
            states=states,
            own=usage,
            waits_for=(
                *(f"process {one.pid} ({one.name})" for one in waited_for),
                *(["a connection to a process outside the job"] if self._connected else []),
            ),
        )


def _usage(process: ProcessStat) -> ProcessUsage:
    return ProcessUsage(cpu_seconds=process.cpu_seconds, io_bytes=read_io_bytes(process.pid) or 0)


def is_service(process: ProcessStat) -> bool:
    """Return whether this is a helper that exits by itself when its ranks have exited."""
    return runs_service(processes.read_arguments(process.pid))


def runs_service(arguments: str) -> bool:
    """Return whether a command line is that of such a helper."""
    return any(mark in arguments for mark in SERVICES)
