"""Report and journal helper processes that were terminated. Called by the supervisor and by the guardian."""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.processes.termination import TerminatedProcess, describe
from grpo_run.runtime.record.reporter import Reporter

EVENT = "processes_ended"
MAX_LISTED = 100
"""Processes in one event."""


def report(reporter: Reporter, terminated: list[TerminatedProcess]) -> None:
    """Write the event and tell the user, if anything was terminated."""
    if not terminated:
        return
    fields = event_fields(terminated, by="supervisor")
    reporter.write(EVENT, **fields)
    if fields["sentence"]:
        reporter.notify(fields["sentence"])


def event_fields(terminated: list[TerminatedProcess], *, by: str) -> dict[str, Any]:
    """Return the fields of the journal's event.

    Args:
        terminated: what was signaled.
        by: who did it: `supervisor`, or `guardian` after the supervisor's death.
    """
    return {
        "by": by,
        "count": len(terminated),
        "sentence": describe(terminated),
        "processes": [
            {
                "pid": one.pid,
                "name": one.name,
                "command": one.command,
                "killed": one.killed,
                "remains": one.remains,
            }
            for one in terminated[:MAX_LISTED]
        ],
    }
