"""The processes that remain after the last line of every script: the ranks' own, and those they may wait for.

    own       the ranks, their descendants in any session, the members of their sessions, and programs that
              inherited a rank's environment and were left by their parents
    awaited   other processes that hold the other end of a pipe, a unix socket or a TCP connection of these

Used by the detector of exit hangs, about once in two seconds. The supervisor and the processes that it
started itself are neither. Reads /proc; judges nothing (`stalls/exit_hangs.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from grpo_run.watchdog.processes import ProcessStat, read_io_bytes
from grpo_run.watchdog.run_processes import peers, process_tree
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
    """Observes the processes of one attempt that remain.

    Args:
        supervisor: pid of this process.
    """

    def __init__(self, supervisor: int | None = None) -> None:
        self._supervisor = os.getpid() if supervisor is None else supervisor
        self._own: set[tuple[int, int]] = set()
        self._foreign: set[tuple[int, int]] = set()
        self._awaited: set[tuple[int, int]] = set()
        self._connected_to: tuple[str, ...] = ()

    def observe(
        self, pids: Mapping[int, int], sockets: Mapping[int, str], *, connections: bool
    ) -> ExitFacts | None:
        """Return the facts of now; None if a rank may not be read.

        Args:
            pids: the ranks that have not exited.
            sockets: paths of their worker servers, which their environment contains.
            connections: look for the other ends of their connections too, which takes tens of milliseconds.

        Raises:
            OSError: /proc cannot be listed.
        """
        table = process_tree.read_processes()
        own = self._own_processes(table, pids, sockets)
        self._own = {process.key for process in own}
        if connections:
            self._look_at_connections(table, own, pids)
        states = {rank: table[pid].state for rank, pid in pids.items() if pid in table}
        usage = {process.key: _usage(process) for process in own}
        for rank, pid in pids.items():
            if rank in states and states[rank] != "Z" and read_io_bytes(pid) is None:
                return None
        ranks = set(pids.values())
        helpers = [process for process in own if process.pid not in ranks and not _is_service(process)]
        return ExitFacts(
            states=states,
            own=usage,
            awaited={
                process.key: _usage(process) for process in table.values() if process.key in self._awaited
            },
            waits_for=tuple(f"process {one.pid} ({one.name})" for one in helpers[:MAX_NAMED])
            + self._connected_to,
        )

    def _own_processes(
        self, table: Mapping[int, ProcessStat], pids: Mapping[int, int], sockets: Mapping[int, str]
    ) -> list[ProcessStat]:
        ranks = set(pids.values())
        family = process_tree.descendants(table, ranks)
        marks = [path.encode() for path in sockets.values()]
        oldest = min((table[pid].started_ticks for pid in ranks if pid in table), default=0)
        ours = process_tree.descendants(table, [self._supervisor])
        found = []
        for process in table.values():
            if not process.is_alive and process.pid not in ranks:
                continue
            if process.pid in family or process.session in ranks or process.key in self._own:
                found.append(process)
            elif process.pid not in ours and process.started_ticks >= oldest:
                if process.key in self._foreign:
                    continue
                if process_tree.inherited(process.pid, marks):
                    found.append(process)
                else:
                    self._foreign.add(process.key)
        return found

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


def _is_service(process: ProcessStat) -> bool:
    arguments = process_tree.read_arguments(process.pid)
    return any(mark in arguments for mark in SERVICES)
