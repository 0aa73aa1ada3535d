"""Two supervisors joined by torch elastic's rendezvous recover and stop together."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest, free_port
from support.trainer_and_loop import TRAINER

STEPS = ("--max-steps", "16", "--save-steps", "4")


def _nodes(runs: Runs, *, cold: bool | None = None) -> tuple[Run, Run]:
    endpoint = f"127.0.0.1:{free_port()}"
    shared = (
        "--run-id", "pair", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "pair",
        "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", "--nproc-per-node", "1",
        str(SCRIPTS / TRAINER), "--output-dir", "ours", *STEPS,
    )  # fmt: skip
    return runs(*shared, name="node0", cold=cold), runs(*shared, name="node1", cold=cold)


@pytest.mark.parametrize("cold", [None, pytest.param(True, marks=pytest.mark.full)], ids=["warm", "cold"])
def test_rank_killed_on_one_node_restarts_both_with_equal_weights(
    cold: bool | None, runs: Runs, tmp_path: Path
) -> None:
    """Both nodes restart from the same checkpoint and end with torchrun's weights."""
    nodes = _nodes(runs, cold=cold)
    with nodes[0].held(after=8):
        for node in nodes:
            node.start()
        for node in nodes:
            node.until_step(6)
        victim = next(node for node in nodes if any(e["rank"] == 1 for e in node.events("rank_started")))
        victim.kill(1)
    for node in nodes:
        node.ended()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 16)
    assert victim.status()["recoveries"][0]["cause"] == "signal"


def test_stop_on_one_node_stops_all_on_one_step(runs: Runs, tmp_path: Path) -> None:
    """SIGTERM to one supervisor stops the ranks of both nodes at one step, with code 75."""
    nodes = _nodes(runs)
    with nodes[0].held(after=5):
        for node in nodes:
            node.start()
        for node in nodes:
            node.until_step(3)
        nodes[1].send_signal(signal.SIGTERM)
        nodes[1].until_event("stop_requested")
    for node in nodes:
        node.ended(75)
    steps = {
        int(path.parent.name.rpartition("-")[2])
        for path in (tmp_path / "ours").glob("checkpoint-*/MANIFEST.json")
    }
    assert max(steps) >= 4
