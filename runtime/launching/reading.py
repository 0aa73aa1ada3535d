"""Reading a run with what its features have in the journal: for commands, pages and reports.

Called by `cli/` and `dashboards/`. The supervisor has the same parts in its own history.
"""

from __future__ import annotations

from grpo_run.runtime.features import modules
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.runtime.history.reader import Follower, RunReader
from grpo_run.runtime.history.run_directory import RunDirectory


def history_parts() -> list[HistoryPart]:
    """Return new parts of a history, one of each feature that has events."""
    return [module.PART() for module in modules("events")]


def run_reader(run: RunDirectory, follower: Follower | None = None) -> RunReader:
    """Return a reader of a run, with the parts of features.

    Args:
        follower: is told of every event, too.
    """
    return RunReader(run, follower, parts=history_parts)
