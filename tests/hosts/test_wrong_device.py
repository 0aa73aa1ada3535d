"""A host whose device computes wrongly twice leaves the run, which goes on without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hosts import HostRun, hosts, missing
from support.references import plain_ranks
from support.runs import SCRIPTS
from support.weights import relative_difference

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.full]
SCRIPT = (str(SCRIPTS / "flips.py"), "--max-steps", "16", "--save-steps", "4")
FLIPS = ("--flip-at", "6", "--flip-rank", "2", "--times", "2", "--moves")


def test_another_host_takes_its_place_in_the_weights_of_a_run_without_the_fault(tmp_path: Path) -> None:
    """It ends with 93 and says why; the others name it, and repeat the steps since they were equal."""
    with hosts(tmp_path, 4) as made:
        command = (*SCRIPT, *FLIPS, "--output-dir", "ours")
        runs = [
            HostRun(host, tmp_path, *command, nodes="3", options=("--compare-every", "4")) for host in made
        ]
        for run in runs[:3]:
            run.start()
        runs[2].ended(93)
        runs[3].start()
        stayed = (runs[0], runs[1], runs[3])
        for run in stayed:
            run.ended()
    last = runs[2].printed().strip().splitlines()[-1]
    assert "Gave up: ranks have differed a second time in this run" in last
    for run in stayed[:2]:
        assert "host node2 gave up: Rank 2 and the others hold different values" in run.printed()
        actions = [event["action"] for event in run.events("action")]
        assert actions == ["restart_from_earlier_checkpoint"] * 2
        assert len(run.events("attempt_started")) == 3
    plain_ranks(tmp_path, [*SCRIPT, "--output-dir", "theirs"], ranks=3)
    assert relative_difference(tmp_path / "ours", tmp_path / "theirs") == 0
