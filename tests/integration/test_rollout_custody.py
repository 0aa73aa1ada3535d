"""No batch is trained on whose samples are of other weights than were meant: with TRL's own client, and the
stand-in server.
"""

from __future__ import annotations

import json
import shlex
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from support.rollout_server.plants import VARIABLE
from support.rollout_server.starting import SCRIPT, command
from support.runs import Run, Runs, digest, free_port

WORDS = (str(SCRIPT), "--max-steps", "5", "--save-steps", "5", "--output-dir")


@pytest.fixture
def served(runs: Runs, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that starts two ranks with a server of their own, in which something is planted."""

    def start(name: str, fault: str = "") -> Run:
        planted = {"fault": fault, "mark": str(tmp_path / f"{name}.mark")}
        server = shlex.join(command(tmp_path, free_port()))
        return runs(
            "--nproc-per-node", "2", "--rollout-server", server, *WORDS, name, name=f"{name}-run",
            environment={VARIABLE: json.dumps(planted)},
        ).start()  # fmt: skip

    return start


@pytest.mark.parametrize("serves", ["stale", pytest.param("base", marks=pytest.mark.full)])
def test_rollouts_of_other_weights_are_made_again(
    serves: str, served: Callable[..., Run], tmp_path: Path
) -> None:
    """A server that says the right version of old weights is started again before they are trained on. One
    that begins anew behind everybody's back, while it generates, answers with the weights of its beginning:
    the samples are thrown away. The run ends in the weights of an undisturbed one.
    """
    plain, run = served("plain"), served("disturbed", "restart engine at generation 4")
    port = run.until_event("rollout_server_started")["port"]
    run.until_event("rollout_server_ready")
    content = json.dumps({"serves": serves}).encode()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/stand_in", content, timeout=30).close()
    incident = run.until_event("incident", timeout_seconds=120)
    plain.ended()
    run.ended()
    assert (incident["cause"], incident["step"]) == ("rollout_stale", 2)
    assert {event["origin"] for event in plain.events("rollout_made")} == {"meant"}
    made = [(event["step"], event["origin"]) for event in run.events("rollout_made") if event["attempt"] == 1]
    meant = [(step, "meant") for step in range(1, 6)]
    assert made == [*meant[:3], (4, "stale"), *meant[3:]]
    assert digest(tmp_path / "disturbed") == digest(tmp_path / "plain")
