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


def check_programs(runs: Runs, *, ranks: int, first: int, programs: int, late: float) -> None:
    """Run random programs on real ranks: all finish, and none is suspected."""
    run = runs(
        "--nproc-per-node", str(ranks), str(SCRIPTS / "random_programs.py"),
        "--first", str(first), "--programs", str(programs), "--late", str(late),
    )  # fmt: skip
    run.start().ended(timeout_seconds=60 + 10 * programs)
    assert run.events("incident") == []
    log = (run.directory / "attempts" / "000" / "rank0.log").read_text()
    assert log.count(": finished") == programs


@pytest.mark.timeout(150)
def test_random_programs_are_left_alone(runs: Runs) -> None:
    """With threads, several groups, late waits, messages, time limits and pauses."""
    check_programs(runs, ranks=3, first=0, programs=6, late=0.8)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_hundred_random_programs_are_left_alone(ranks: int, runs: Runs) -> None:
    """A third of them on each number of ranks."""
    check_programs(runs, ranks=ranks, first=100, programs=67, late=1.0)
