"""A callback or a data stream that would stop one rank alone stops all ranks together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.references import plain_ranks
from support.runs import CONFIGS, SCRIPTS, Runs

from grpo_run.runtime.launch.accelerate import load_parallelism

SCRIPT = [str(SCRIPTS / "one_rank_asks.py"), "--max-steps", "6"]
JOINT_SAVES = {
    "stop": "checkpoint-4",
    "save": "checkpoint-4",
    "metric": "checkpoint-3",
    "epoch": "checkpoint-3",
}


@pytest.mark.parametrize("mode", ["ddp", pytest.param("zero2", marks=pytest.mark.full)])
def test_all_ranks_end_where_they_would_if_all_had_asked(runs: Runs, tmp_path: Path, mode: str) -> None:
    """Six forms: no deadlock, a checkpoint of all ranks, and the weights of plain ranks that all ask."""
    run = runs(*SCRIPT, "--output-dir", str(tmp_path / "out"), mode=mode).start().ended()
    asked = json.loads((tmp_path / "out" / "asked.json").read_text())
    assert run.status()["recoveries"] == []
    said = [event["text"] for event in run.events("warning") if event.get("shown")]
    assert [text.split(" asked ")[0] for text in said] == [
        *["rank 1: Asks.on_step_end"] * 3,
        "rank 1: OwnMetric.on_evaluate",
        (
            "the data of rank 1 ended with step 3, that of the other ranks did not: the epoch ends there on"
            " all ranks"
        ),
        "rank 1: Asks.on_epoch_end",
    ]
    assert all(text in run.printed() for text in said)
    expected = reference(mode, tmp_path)
    for kind, name in JOINT_SAVES.items():
        assert name in asked[kind]["checkpoints"]
        manifest = json.loads((tmp_path / "out" / kind / name / "MANIFEST.json").read_text())
        assert manifest["world_size"] == 2
    for kind, of_all in expected.items():
        for compared in ("step", "weights", "evaluated"):
            assert asked[kind][compared] == of_all[compared], (kind, compared)


def reference(mode: str, folder: Path) -> dict[str, Any]:
    """Return what the script does without grpo-run if all ranks ask."""
    path = CONFIGS / f"{mode}.yaml"
    parallelism = load_parallelism(path, nproc_per_node=None, nnodes=1, has_accelerator=False)
    (folder / "tests").symlink_to(CONFIGS.parent)  # the paths in the configurations are relative
    command = [*SCRIPT, "--output-dir", "on-all", "--on-all"]
    plain_ranks(folder, command, ranks=2, environment=parallelism.environment)
    found: dict[str, Any] = json.loads((folder / "on-all" / "asked.json").read_text())
    return found
