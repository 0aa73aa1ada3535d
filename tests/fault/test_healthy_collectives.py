"""Programs whose ranks wait for one another in unusual ways finish under the watchdog, without an
incident.
"""

from __future__ import annotations

import pytest
from support.runs import SCRIPTS, Runs


@pytest.mark.timeout(120)
def test_ranks_that_wait_in_unusual_ways_are_left_alone(runs: Runs) -> None:
    """All of `tests/scripts/groups.py`: threads that serve a group, late senders, groups of other ranks.

    Each wait lasts long enough for several polls.
    """
    run = runs("--nproc-per-node", "3", str(SCRIPTS / "groups.py"), "0.8").start().ended()
    assert run.events("incident") == []
    assert run.events("suspicion") == []
