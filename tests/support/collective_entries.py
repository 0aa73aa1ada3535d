"""Write entries to a rank's collective log in one call, with any progress. Called by unit tests."""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.board.collective_log import CollectiveLogWriter, describe
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress

DESCRIBED = ("group", "operation", "sizes", "dtypes", "file", "line", "function")


def add_entry(
    log: CollectiveLogWriter, *, progress: CollectiveProgress = CollectiveProgress.enqueued, **fields: Any
) -> int:
    """Add an entry and return its number. A field that is not given is that of an all-reduce of one tensor.

    Args:
        fields: arguments of `describe` and of `CollectiveLogWriter.add`.
    """
    usual = {
        "group": "0", "operation": "allreduce", "sizes": "3", "dtypes": "Float", "file": "t.py", "line": 1,
        "function": "f", "sequence": 1, "step": 8,
    }  # fmt: skip
    given = usual | fields
    description = describe(**{name: given.pop(name) for name in DESCRIBED})
    number = log.add(description, **given)
    if progress is not CollectiveProgress.enqueued:
        log.mark(number, progress)
    return number
