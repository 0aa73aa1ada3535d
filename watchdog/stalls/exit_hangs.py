"""Exit hangs: ranks whose script has run its last line, whose process is still there and does nothing.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.observation import RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.stall import ProcessFacts

QUIET_BYTES = 64 * 1024
"""Total I/O of an inactive process; a logger writes less at exit."""
QUIET_CPU_FRACTION = 0.01
"""Share of one core that the threads of an idle interpreter may use."""


def find_exit_hangs(
    slots: Mapping[int, Slot | None],
    processes_before: Mapping[int, ProcessFacts | None],
    processes_now: Mapping[int, ProcessFacts | None],
    quiet_seconds: float,
    settings: DeadlineSettings,
) -> tuple[int, ...]:
    """Return the ranks that hang at exit.

    An upload or a last write is progress: bytes are transferred in the rank or in a child of it. If the sums
    of a session have decreased, one of its processes has exited, which is progress too. A stopped or sleeping
    process makes no progress.

    Args:
        processes_before: facts from `quiet_seconds` ago.
        processes_now: current facts. A rank that is absent or None in either mapping is not judged.
    """
    hung: list[int] = []
    for rank, slot in sorted(slots.items()):
        before, now = processes_before.get(rank), processes_now.get(rank)
        if slot is None or slot.state is not RankState.done or before is None or now is None:
            continue
        quiet = (
            abs(now.cpu_seconds - before.cpu_seconds) <= QUIET_CPU_FRACTION * quiet_seconds
            and abs(now.io_bytes - before.io_bytes) < QUIET_BYTES
        )
        if quiet and now.state != "Z" and quiet_seconds >= settings.exit_seconds:
            hung.append(rank)
    return tuple(hung)
