"""A hand-written generation loop with two defects hangs without us, is named by us, and runs with consensus
and caps.
"""

from __future__ import annotations

from pathlib import Path

from support.runs import Runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "augmented_generation.py"


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
