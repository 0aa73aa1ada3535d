"""The stand-in for vLLM's server: TRL trains with it, and its answers are exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.references import plain_ranks
from support.rollout_server.starting import SCRIPT, StandIn, stand_in
from support.runs import Runs, digest

STEPS = ("--max-steps", "4", "--save-steps", "4")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    with stand_in(tmp_path) as made:
        yield made


def test_trl_trains_with_it(server: StandIn, runs: Runs, tmp_path: Path) -> None:
    """Supervised ranks and plain ones end with the same weights; at each step the server has the trainer's
    weights, and samples from them.
    """
    words = [str(SCRIPT), "--settings", json.dumps({"generation_kwargs": {"seed": 7}}), "--output-dir"]
    runs("--nproc-per-node", "2", *words, "ours", *STEPS, environment=server.environment()).start().ended()
    plain_ranks(tmp_path, [*words, "theirs", *STEPS], ranks=2, environment=server.environment())
    assert digest(tmp_path / "ours") == digest(tmp_path / "theirs")
    synced = [
        line.split()[1]
        for name in ("ours", "theirs")
        for line in (tmp_path / name / "synced.txt").read_text().splitlines()
    ]
    assert len(set(synced)) == 4
    assert server.look()["digests"] == synced
    logged = json.loads((tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").read_text())[
        "log_history"
    ]
    assert len(logged) == 4
    assert all(one["sampling/sampling_logp_difference/max"] < 1e-5 for one in logged)
