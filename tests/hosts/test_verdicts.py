"""All hosts of a run give one verdict on a fault, with the host, the rank and the line where it happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import HostRun, hosts, missing
from support.runs import SCRIPTS
from support.trainer_and_loop import TRAINER

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SCRIPT = (str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "16", "--save-steps", "4")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[HostRun]]:
    """Two hosts with a rank each."""
    with hosts(tmp_path, 2) as made:
        yield [HostRun(host, tmp_path, *SCRIPT) for host in made]


def _started(runs: list[HostRun]) -> None:
    for run in runs:
        run.start()
    for run in runs:
        run.until_step(6)


def test_a_killed_rank_is_named_with_its_host_by_all(pair: list[HostRun]) -> None:
    """Not as a lost connection on the hosts that have lost theirs; `status` shows both hosts."""
    with pair[0].held(9):
        _started(pair)
        pair[1].kill(1)
        for run in pair:
            said = run.until_event("incident")
            assert (said["cause"], said["culprit"]) == ("signal", 1)
            assert said["sentence"].startswith("Rank 1 on host node1 was killed by SIGKILL")
            assert run.until_event("action")["action"] == "restart"
            run.until_event("attempt_started", count=2)
            run.until_step(8)
        shown = pair[0].command("status")
        assert "host node0: rank 0, running" in shown
        assert "host node1: rank 1, running" in shown
        for run in pair:
            run.kill_supervisor()


@pytest.mark.full
def test_a_killed_supervisor_is_named(pair: list[HostRun]) -> None:
    """The survivor knows that its host is up, and that nobody supervises there."""
    with pair[0].held(9):
        _started(pair)
        pair[1].kill_supervisor()
        said = pair[0].until_event("incident")
        pair[0].kill_supervisor(15)
        pair[0].ended(75)
    assert said["cause"] == "node_lost"
    assert said["sentence"] == "The supervisor of host node1 is gone, and its ranks with it."
