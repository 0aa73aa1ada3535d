"""Which processes belong to a run: those that its ranks have started, proved by descent or by a token.

    descent    from a rank; from the session of a rank; or a child of the supervisor that it did not
               start: the kernel hands it the orphans of its descendants (`runtime/processes/adoption.py`)
    token      the environment that a program was started with contains the token of this supervisor
    memory     seen earlier as one of these

Never one in the supervisor's own session: a rank leads a session of its own, and nobody can join another one.
Used by the exit rules (`remaining.py`), by the supervisor at the end of an attempt, and by the guardian after
the supervisor's death. Reads /proc; ends nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from grpo_run.watchdog.processes import ProcessStat, descendants, read_environment, read_stat

TOKEN_VARIABLE = "GRPO_RUN_TOKEN"


class RunProcesses:
    """The processes of one supervisor's ranks.

    Args:
        supervisor: its pid.
        session: its session.
        tokens: values of `TOKEN_VARIABLE` that prove ownership.
        companion: value that proves the opposite: what a companion of the ranks has started, such as a
            server, may be adopted, too.
        started_by_supervisor: returns the pids of other processes that it has started with a session of their
            own. What these start in their sessions is not the ranks'.
        adopts_only_ours: a child of the supervisor that it did not start descends from a rank. Not so for pid
            1 of a container, which adopts everything, nor with children from before the launch (`helper &
            exec …`).
        any_age: the tokens are of earlier supervisors, so that processes older than this one may have them.
    """

    def __init__(
        self,
        supervisor: int,
        session: int,
        *,
        tokens: Sequence[str] = (),
        companion: str = "",
        started_by_supervisor: Callable[[], Collection[int]] = frozenset,
        adopts_only_ours: bool = False,
        any_age: bool = False,
    ) -> None:
        self.supervisor = supervisor
        self._session = session
        self._marks = [f"{TOKEN_VARIABLE}={token}\0".encode() for token in tokens]
        self._companion = f"{TOKEN_VARIABLE}={companion}\0".encode() if companion else b""
        self._started_by_supervisor = started_by_supervisor
        self.adopts_only_ours = adopts_only_ours
        own = read_stat(supervisor)
        self._oldest_ticks = own.started_ticks if own is not None and not any_age else 0
        self._ranks: dict[int, tuple[int, int]] = {}
        self._known: set[tuple[int, int]] = set()
        self._foreign: set[tuple[int, int]] = set()
        self._unkillable: set[tuple[int, int]] = set()

    def begin_attempt(self, ranks: Collection[int]) -> None:
        """Take note of the ranks of an attempt, by pid, before any of them has been waited for."""
        stats = [read_stat(pid) for pid in ranks]
        self._ranks = {stat.pid: stat.key for stat in stats if stat is not None}
        self._known.update(self._ranks.values())

    def give_up(self, pids: Collection[int]) -> None:
        """Find these processes no more: they have survived SIGKILL, and nothing that could be done would end
        them.

        In uninterruptible sleep a process does no work, and never will: it exits when it wakes up.

        Args:
            pids: of processes that were found last.
        """
        self._unkillable.update(key for key in self._known if key[0] in pids)

    def find(self, table: Mapping[int, ProcessStat]) -> dict[int, ProcessStat]:
        """Return the run's processes that are alive, by pid: the ranks and all that they have started.

        Args:
            table: all processes of the machine, just read.
        """
        excluded = {self.supervisor, *self._started_by_supervisor()}
        below = descendants(table, [self.supervisor])
        candidates = [
            process
            for process in table.values()
            if process.session != self._session
            and excluded.isdisjoint((process.pid, process.session))
            and process.key not in self._unkillable
        ]
        found = descendants(table, [one.pid for one in candidates if self._descends(one, table, below)])
        marked = [
            process.pid
            for process in candidates
            if process.pid not in found
            and process.started_ticks >= self._oldest_ticks
            and self._has_token(process)
        ]
        found |= descendants(table, marked)
        ours = {process.pid: process for process in candidates if process.pid in found and process.is_alive}
        self._known = {process.key for process in ours.values()}
        return ours

    def _descends(
        self, process: ProcessStat, table: Mapping[int, ProcessStat], below: Collection[int]
    ) -> bool:
        if process.key in self._known:
            return True
        if process.parent == self.supervisor and self.adopts_only_ours:
            return not self._companion or self._companion not in read_environment(process.pid)
        leader = table.get(process.session)
        rank = self._ranks.get(process.session)
        # the pid of a rank that has exited may be in use again
        return rank is not None and process.pid in below and (leader is None or leader.key == rank)

    def _has_token(self, process: ProcessStat) -> bool:
        if not self._marks or process.key in self._foreign or not process.is_alive:
            return False
        environment = read_environment(process.pid)
        if any(mark in environment for mark in self._marks):
            return True
        if environment or not os.access(f"/proc/{process.pid}/environ", os.R_OK):
            self._foreign.add(process.key)  # else it is in the middle of an exec
        return False
