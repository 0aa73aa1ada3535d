"""Hosts that wait say for whom, where and how long, and end with 75 when nobody can come any more."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.hosts import HostRun, hosts, missing, start_all
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.full]
SCRIPT = (str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "16", "--save-steps", "4")
SOON = ("--rdzv-conf", "join_timeout=6")
LOST_SECONDS = 15.0
RAW = re.compile(r"Rendezvous\w*Error|DistStoreError|DistNetworkError|frame #|grpo-run itself failed")


def _last_line(run: HostRun) -> str:
    said = run.printed()
    assert not RAW.search(said), said
    return said.strip().splitlines()[-1]


def test_a_limit_ends_each_wait(tmp_path: Path) -> None:
    """A host that never comes, and an endpoint that never answers, are named."""
    with hosts(tmp_path, 2) as made:
        runs = [HostRun(host, tmp_path, *SCRIPT, options=SOON) for host in made]
        for run in reversed(runs):  # the endpoint is there only when the other one has left
            run.start().ended(75)
    assert "waiting for 1 of 2 hosts at node0:29500, " in runs[0].printed()
    assert "1 of 2 hosts has not come to node0:29500 within 6 s. Run the same commands" in _last_line(runs[0])
    assert "waiting for node0:29500 to answer, " in runs[1].printed()
    assert "node0:29500 has not answered within 6 s. Run the same commands again" in _last_line(runs[1])
    for run in runs:
        assert run.status()["state"] == "stopped"


def test_the_lost_endpoint_ends_the_others_with_evidence(tmp_path: Path) -> None:
    """All others end within 15 s with 75; the same commands then continue from what they have in memory."""
    with hosts(tmp_path, 2) as made:
        runs = [HostRun(host, tmp_path, *SCRIPT) for host in made]
        with runs[0].held(10):
            start_all(runs, 9)
            made[0].kill()
            lost_at = time.monotonic()
            runs[1].ended(75)
            assert time.monotonic() - lost_at < LOST_SECONDS
        assert "where the hosts meet, does not answer any more" in _last_line(runs[1])
        assert [verdict["cause"] for verdict in runs[1].verdicts()] == ["node_lost"]
        made[0].boot()
        for run in runs:
            run.start()
        for run in runs:
            run.ended()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 16)
    resumed = runs[0].events("resume_chosen")[-1]
    assert resumed["in_memory"]
    assert resumed["step"] >= 8


def test_a_lost_host_is_named_by_those_that_wait_for_it(tmp_path: Path) -> None:
    """Its loss is a fault with a cause, although no rank of this host has failed; a stop ends the wait."""
    with hosts(tmp_path, 2) as made:
        runs = [HostRun(host, tmp_path, *SCRIPT) for host in made]
        with runs[0].held(10):
            start_all(runs, 9)
            made[1].kill()
            lost_at = time.monotonic()
            runs[0].until_event("incident", cause="node_lost")
            assert time.monotonic() - lost_at < LOST_SECONDS
            runs[0].until(
                lambda events: "waiting for 1 of 2 hosts" in runs[0].printed().partition("FAULT")[2]
            )
            runs[0].kill_supervisor(15)
            runs[0].ended(75)
    assert "FAULT Host node1 is lost: it has not answered for" in runs[0].printed()
    assert "checkpoint at step 8" in _last_line(runs[0])
