"""A hand-written generation loop with two defects hangs without us, is named by us, and runs with consensus
and caps.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.runs import BIN, Runs
from support.warm import QUIET

EXAMPLE = Path(__file__).parents[2] / "examples" / "augmented_generation.py"
HUNG_SECONDS = 30.0
"""Many times what the loop takes where it ends."""


def test_the_loop_with_defects_is_named(runs: Runs) -> None:
    """The collectives of both ranks, with their lines."""
    run = runs("--nproc-per-node", "2", "--max-restarts", "0", str(EXAMPLE), "--before").start()
    assert run.wait() != 0, run.tail()
    (verdict,) = run.verdicts()
    sentence = verdict["sentence"]
    lines = {
        name: number
        for number, line in enumerate(EXAMPLE.read_text().splitlines(), 1)
        for name in ("all_reduce(rewards)", "all_gather(counts")
        if name in line
    }
    for rank, name, number in (
        (0, "all_reduce", lines["all_reduce(rewards)"]),
        (1, "all_gather", lines["all_gather(counts"]),
    ):
        assert f"rank {rank} is in {name} (augmented_generation.py:{number}, " in sentence


def test_the_loop_with_consensus_and_caps_runs_to_the_end(runs: Runs) -> None:
    """Both ranks take part in every collective, and the loops of both are ended."""
    run = runs("--nproc-per-node", "2", str(EXAMPLE)).start().ended()
    assert not run.events("incident")


@pytest.mark.full
def test_the_loop_with_defects_hangs_under_torchrun(tmp_path: Path) -> None:
    """So that the tests above show something."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--before"]
    environment = {**QUIET, "PATH": "/usr/bin:/bin", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(HUNG_SECONDS)
        process.terminate()  # torchrun terminates its ranks
        process.wait(HUNG_SECONDS)
