"""No batch is trained on whose samples are of other weights than were meant: with TRL's own client and the
stand-in server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.rollout_server.starting import SCRIPT, StandIn, stand_in
from support.runs import Runs, digest

WORDS = ("--max-steps", "5", "--save-steps", "5")


@contextlib.contextmanager
def started_again(folder: Path, plants: Sequence[dict[str, Any]]) -> Iterator[list[StandIn]]:
    """A server that somebody starts again whenever it dies, each time with the next plants; yields those that
    were started.
    """
    servers = [StandIn(folder, **plants[0]).ready()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            if servers[-1].process.poll() is not None and len(servers) < len(plants):
                servers.append(StandIn(folder, port=servers[0].port, **plants[len(servers)]))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield servers
    finally:
        ended.set()
        watching.join()
        for server in servers:
            server.close()


@pytest.mark.parametrize("serves", ["stale", pytest.param("base", marks=pytest.mark.full)])
def test_rollouts_of_other_weights_are_made_again(serves: str, runs: Runs, tmp_path: Path) -> None:
    """A server that says the right version of old weights ends the attempt before they are trained on. One
    that is started again while it generates answers TRL's repeated request with the weights that it began
    with: the samples are thrown away. The run ends in the weights of an undisturbed one.
    """
    launch = ("--nproc-per-node", "2", str(SCRIPT), *WORDS, "--output-dir")
    plants: list[dict[str, Any]] = [{"serves": serves}, {"fault": "kill server at completion 12"}, {}]
    with stand_in(tmp_path) as healthy, started_again(tmp_path, plants) as servers:
        plain = runs(*launch, "plain", name="plain-run", environment=healthy.environment()).start()
        run = runs(*launch, "disturbed", environment=servers[0].environment()).start()
        incident = run.until_event("incident", timeout_seconds=120)
        servers[0].close()
        plain.ended()
        run.ended()
        assert len(servers) == len(plants)
    assert (incident["cause"], incident["step"]) == ("rollout_stale", 2)
    assert {event["origin"] for event in plain.events("rollout_made")} == {"meant"}
    made = [(event["step"], event["origin"]) for event in run.events("rollout_made") if event["attempt"] == 1]
    meant = [(step, "meant") for step in range(1, 6)]
    assert made == [*meant[:2], (3, "stale"), *meant[2:]]
    assert digest(tmp_path / "disturbed") == digest(tmp_path / "plain")
