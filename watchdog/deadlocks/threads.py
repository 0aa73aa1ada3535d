"""What a rank reports about its threads: which of them wait in collectives, and which may still act.

A `ThreadReport` is made in the rank (`runtime.rank.worker_server`), fetched by
`runtime.supervisor.detection.collective_records` and applied to a `Position` here. Pure. A rank without a report, or of
which a thread may act, is never stuck: such a thread may issue any collective, or end another thread's wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from grpo_run.watchdog.deadlocks.positions import MAIN_THREAD_IN_BACKWARD, Position

THREADS_HANDLER = "grpo_run_threads"
"""Name of the handler of torch's worker server that answers with a report."""


class ThreadReport(BaseModel):
    """The threads of one rank at one instant. Threads that never issue collectives are left out.

    `waiting` are the threads that wait in a collective of the log, without a time limit of their own.
    `passive` are those that only another thread of this process can wake. Both have the thread's number of
    context switches, which does not change while it sleeps. `active` describes every other thread.
    `in_backward`: the main thread is in C++ code of a DDP backward pass, with this number of context
    switches. `issued` is how many collectives the rank has issued in each group that Python has used.
    `uses_futures`: the completion of a collective may run code of the script.
    """

    model_config = ConfigDict(frozen=True)

    waiting: Mapping[str, int]
    passive: Mapping[str, int]
    active: tuple[str, ...]
    in_backward: int | None
    issued: Mapping[str, int]
    uses_futures: bool


def with_threads(position: Position, report: ThreadReport | None) -> Position:
    """The position of a rank with what it reports about its threads."""
    if report is None or position.exited:
        return replace(position, waiting_threads=None, in_backward=False)
    waiting = set(report.waiting)
    in_backward = position.in_backward and report.in_backward is not None
    if in_backward:
        waiting.add(MAIN_THREAD_IN_BACKWARD)
    # a collective in memory has no future
    pending = {record for record in position.records or () if not record.completed and not record.in_memory}
    continues = report.uses_futures and any(
        record.thread not in report.waiting or record.point_to_point for record in pending
    )
    may_act = report.active or continues or (report.in_backward is not None and not in_backward)
    return replace(
        position,
        waiting_threads=None if may_act else frozenset(waiting),
        issued={**position.issued, **report.issued},
        in_backward=in_backward,
    )
