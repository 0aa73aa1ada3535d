"""How tests are distributed over pytest-xdist's workers, and in which order.

xdist's `loadgroup` does the same by marks, but version 3.8 ignores them with pytest 9.2.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("test_prometheus.py", "test_rank_is_torchruns.py", "test_torture.py", "test_torture_files.py")
"""Files of integration and fault tests with expensive module fixtures: one worker runs all their tests."""
LONGEST_FIRST = (
    "test_demo",
    "test_torture.py",
    "test_hangs_end",
    "test_an_interpreter_that",
    "test_parallel_modes.py",
    "test_deadlocks.py",
    "test_equality.py",
    "test_fresh_interpreters",
    "test_rank_is_torchruns.py",
    "test_torture_runs.py",
    "test_prometheus.py",
)
"""Parts of the ids of long tests. They start first, so that no worker waits for one at the end."""


class Scheduling(LoadScopeScheduling):
    """Gives out unit tests and `TOGETHER` by file, all other tests one by one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if "tests/unit/" in nodeid or file.endswith(TOGETHER) else nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first; pytest-randomly decides the order of the others."""

    def place(item: pytest.Item) -> int:
        found = (index for index, part in enumerate(LONGEST_FIRST) if part in item.nodeid)
        return next(found, len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Called by xdist in the controller."""
    return Scheduling(config, log)
