"""Programs whose ranks wait for one another in unusual ways finish under the watchdog, without an
incident.
"""

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


def check_programs(runs: Callable[..., Run], *, ranks: int, first: int, programs: int, late: float) -> None:
    """Run random programs on real ranks: all finish, and none is suspected."""
    run = runs(
        "--nproc-per-node", str(ranks), str(SCRIPTS / "random_programs.py"),
        "--first", str(first), "--programs", str(programs), "--late", str(late),
    )  # fmt: skip
    assert run.start().wait(60 + 10 * programs) == 0, run.tail()
    assert run.events("incident") == []
    log = (run.directory / "attempts" / "000" / "rank0.log").read_text()
    assert log.count(": finished") == programs


@pytest.mark.timeout(150)
def test_random_programs_are_left_alone(runs: Callable[..., Run]) -> None:
    """With threads, several groups, late waits, messages, time limits and pauses."""
    check_programs(runs, ranks=3, first=0, programs=6, late=0.8)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_hundred_random_programs_are_left_alone(ranks: int, runs: Callable[..., Run]) -> None:
    """A third of them on each number of ranks."""
    check_programs(runs, ranks=ranks, first=100, programs=67, late=1.0)
