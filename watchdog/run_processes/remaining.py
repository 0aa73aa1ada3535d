"""The processes that remain after the last line of every script: the ranks' own, and those they may wait for.

    own       the ranks and what they have started (`ownership.py`); once no rank is left, without services and
              without what the user keeps, which nobody waits for
    awaited   other processes that hold the other end of a pipe, a unix socket or a TCP connection of these

Used by the detector of exit hangs and by the wait for helpers at the end of a run, about once in two seconds. The
supervisor and the processes that it started itself are neither. Reads /proc; judges nothing
(`watchdog/stalls/exit_hangs.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from grpo_run.watchdog.processes import ProcessStat, read_io_bytes
from grpo_run.watchdog.run_processes import peers, process_tree
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
        supervisor: pid of this process.
    """

    def __init__(
        self, owned: RunProcesses, *, keep: Sequence[str] = (), supervisor: int | None = None
    ) -> None:
        self._owned = owned
        self._keep = keep
        self._supervisor = os.getpid() if supervisor is None else supervisor
        self._awaited: set[tuple[int, int]] = set()
        self._connected_to: tuple[str, ...] = ()

    def observe(self, pids: Mapping[int, int], *, connections: bool) -> ExitFacts | None:
        """Return the facts of now; None if a rank may not be read.

        Args:
            pids: the ranks that have not exited.
            connections: look for the other ends of their connections too, which takes tens of milliseconds.

        Raises:
            OSError: /proc cannot be listed.
        """
        table = process_tree.read_processes()
        found = self._owned.find(table)
        ranks = set(pids.values())
        helpers = [one for pid, one in found.items() if pid not in ranks and not is_service(one)]
        own = list(found.values())
        if not ranks:
            own = [one for one in without_kept(found, self._keep).values() if not is_service(one)]
        if connections:
            self._look_at_connections(table, own, pids)
        states = {rank: table[pid].state for rank, pid in pids.items() if pid in table}
        usage = {process.key: _usage(process) for process in own}
        for rank, pid in pids.items():
            if rank in states and states[rank] != "Z" and read_io_bytes(pid) is None:
                return None
        waited_for = helpers[:MAX_NAMED] if ranks else []
        return ExitFacts(
            states=states,
            own=usage,
            awaited={
                process.key: _usage(process) for process in table.values() if process.key in self._awaited
            },
            waits_for=tuple(f"process {one.pid} ({one.name})" for one in waited_for) + self._connected_to,
        )

    def _look_at_connections(
        self, table: Mapping[int, ProcessStat], own: list[ProcessStat], pids: Mapping[int, int]
    ) -> None:
        own_pids = {process.pid for process in own}
        ours = process_tree.descendants(table, [self._supervisor]) - own_pids
        # what the supervisor holds too was inherited from whoever started it
        inherited = frozenset[str]().union(*(peers.open_links(pid) for pid in ours))
        held = frozenset[str]().union(*(peers.open_links(pid) for pid in own_pids))
        ends = peers.other_ends(held - inherited, next(iter(pids.values()), self._supervisor))
        outside = ends.links - inherited
        strangers = [pid for pid in table if pid not in own_pids and pid not in ours]
        holding = [table[pid] for pid in peers.holders(outside, strangers) if table[pid].is_alive]
        self._awaited = {process.key for process in holding}
        named = [f"process {one.pid} ({one.name})" for one in holding[:MAX_NAMED]]
        unseen = any(link.startswith("socket:") for link in outside - held) and not holding
        if ends.remote:
            named.append("another machine")
        elif unseen or ends.unknown:
            named.append("a process that cannot be seen from here")
        self._connected_to = tuple(named)


def _usage(process: ProcessStat) -> ProcessUsage:
    return ProcessUsage(cpu_seconds=process.cpu_seconds, io_bytes=read_io_bytes(process.pid) or 0)


def is_service(process: ProcessStat) -> bool:
    """Return whether this is a helper that exits by itself when its ranks have exited."""
    return runs_service(process_tree.read_arguments(process.pid))


def runs_service(arguments: str) -> bool:
    """Return whether a command line is that of such a helper."""
    return any(mark in arguments for mark in SERVICES)
