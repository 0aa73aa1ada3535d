"""Generation caps and cleanup, set on the command line for an unmodified script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

from grpo_run.runtime.board.board import Board


def caps(*settings: str) -> list[str]:
    """The options that set caps."""
    return [f"--generation={setting}" for setting in settings]


def test_caps_reach_generation_and_are_journaled(runs: Runs, tmp_path: Path) -> None:
    """`--generation` limits completions, and the journal records the old and new values."""
    run = runs(
        "--nproc-per-node", "2",
        *caps("max_completion_length=3", "max_time=30", "repetition=64"), str(SCRIPTS / "grpo.py"),
        "--output-dir", "out", "--max-steps", "12",
        "--save-steps", "4",
    ).start().ended()  # fmt: skip
    changed = {event["key"]: (event["old"], event["new"]) for event in run.events("generation_capped")}
    assert changed["max_completion_length"][1] == 3
    assert changed["max_completion_length"][0] > 3
    assert changed["max_time"] == (None, 30.0)
    assert changed["repetition"] == (None, 64)
    lengths = [event["completion_length"] for event in run.events("step_logged")]
    assert lengths
    assert max(lengths) <= 3


def recorded(folder: Path) -> list[dict[str, Any]]:
    """What the script has recorded of the collections of both ranks."""
    return [json.loads((folder / f"collections-rank{rank}.json").read_text()) for rank in range(2)]


def test_garbage_of_one_rank_is_collected_on_the_same_steps_on_all(runs: Runs, tmp_path: Path) -> None:
    """It is freed, its cost is journaled, the weights are unchanged, and no training step has an automatic
    collection.
    """
    run = runs(
        "--cleanup-every", "2", "--nproc-per-node", "2", str(SCRIPTS / "garbage.py"), "--output-dir", "out",
        "--max-steps", "16", "--save-steps", "100", "--step-seconds", "0.2", "--garbage-rank", "1",
        "--garbage-mib", "128", "--own-choice",
    ).start().ended()  # fmt: skip
    cleaned = run.events("cleanup")
    steps = [event["step"] for event in cleaned]
    assert steps
    assert {(event["rank"], event["garbage"], event["caches"]) for event in cleaned} == {(0, True, False)}
    assert all(0 < event["seconds"] < 60 for event in cleaned)
    board = Board.open(run.directory / "board.mmap")
    for rank, record in enumerate(recorded(tmp_path / "out")):
        assert [step for step in record["full"] if step] == steps
        assert record["inside"] == 0
        assert record["outside"] > 0
        assert (record["enabled"], record["threshold"], record["in_child"]) == (True, [500, 9, 100_000], 500)
        slot = board.read(rank)
        assert slot is not None
        assert slot.cleanup_runs == len(steps)
    memory = board.rank_memory(1)
    assert memory is not None
    assert memory.freed_bytes > 256 * 2**20
    assert digest(tmp_path / "out") == undisturbed("sft.py", 16)
