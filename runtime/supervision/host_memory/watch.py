"""The supervisor's watch over the host's memory: called at its start, for each attempt, and at every poll.

Lets the kernel prefer ranks to the supervisor when it must kill a process, keeps the last sample on disk, and tells the
incident investigation which ranks the kernel has killed. Does not make verdicts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from grpo_run.runtime import upstream
from grpo_run.runtime.host_memory.accounting import HostMemory
from grpo_run.runtime.host_memory.last_sample import LastSample
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.watchdog.host_memory.kills import KernelKills
from grpo_run.watchdog.host_memory.sample import HostSample
from grpo_run.watchdog.observation import Exit
from grpo_run.watchdog.processes import read_file

SCORE_RAISE = 50
"""How much more readily the kernel kills a rank, in thousandths of the memory (proc_pid_oom_score_adj(5)): supervisor and
forkserver use less than 5 % of any memory in which ranks train. Raising it needs no privilege."""
MAX_SCORE = 1000


class HostWatch:
    """Watches the host's memory during one run.

    Args:
        run: its directory, which receives the last sample.
        staging: the run's snapshots in memory; None if there are none.
    """

    def __init__(self, run: RunDirectory, staging: StagingArea | None) -> None:
        self._staging = staging
        self._memory = HostMemory(
            staging_bytes=self._staging_bytes,
            own_pids=_own_pids,
            publish=LastSample(run.host_memory).write,
        )

    @property
    def latest(self) -> HostSample | None:
        """The last sample; None before the first."""
        return self._memory.latest

    def begin_attempt(self, pids: Mapping[int, int]) -> None:
        """Watch the ranks that were just started, by rank."""
        for pid in pids.values():
            prefer_to_kill(pid)
        self._memory.begin_attempt(pids)

    def poll(self) -> None:
        """Read what is due."""
        self._memory.poll()

    def kills_of(self, exits: Collection[Exit]) -> KernelKills:
        """Return which of the ranks that have exited the kernel has killed for lack of memory."""
        return self._memory.kills_of(exits)

    def _staging_bytes(self) -> int:
        if self._staging is None:
            return 0
        with contextlib.suppress(OSError):  # a slot is being emptied
            return sum(slot.size_bytes() for slot in self._staging.slots)
        return 0


def prefer_to_kill(pid: int) -> None:
    """Raise the score by which the kernel chooses whom to kill when memory is full, for a process and what it starts."""
    try:
        present = int(read_file(f"/proc/{pid}/oom_score_adj") or b"0")
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(min(MAX_SCORE, present + SCORE_RAISE)))
    except (OSError, ValueError):
        return  # it has exited, or /proc may not be written: the kernel then chooses by size alone


def _own_pids() -> list[int]:
    server = upstream.forkserver_pid()
    return [os.getpid(), *([server] if server is not None else [])]
