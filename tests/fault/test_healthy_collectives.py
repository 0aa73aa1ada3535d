"""Programs whose ranks wait for one another in unusual ways finish under the watchdog, without an incident."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.runs import SCRIPTS, Run

SITUATIONS = ("thread", "late_sender", "monitored", "no_member")


@pytest.mark.timeout(120)
def test_ranks_that_wait_in_unusual_ways_are_left_alone(runs: Callable[..., Run]) -> None:
    """Threads that serve a group, late senders, monitored barriers, and groups of other ranks.

    Each wait lasts long enough for several polls.
    """
    run = runs("--nproc-per-node", "3", str(SCRIPTS / "healthy_collectives.py"), "--late", "0.8", *SITUATIONS)
    assert run.start().wait(90) == 0, run.tail()
    assert run.events("incident") == []
    assert run.events("suspicion") == []
