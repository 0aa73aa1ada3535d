"""Every parallelism mode trains under supervision on CPU and resumes to the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.partition import check_partition
from support.runs import SCRIPTS, Runs, digest

STEPS = ("--max-steps", "8", "--save-steps", "4", "--record-partition")


def _local_parts(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads((output_dir / f"partition-rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "mode", ["zero3", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("fsdp2", "ddp", "zero2"))]
)
def test_mode_survives_a_kill_with_equal_weights(mode: str, runs: Runs, tmp_path: Path) -> None:
    """The undisturbed and the killed run end with the same weights, and the model is partitioned in both."""
    digests = {}
    for name in ("undisturbed", "killed"):
        run = runs(
            "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", str(tmp_path / name), *STEPS,
            name=f"run-{name}", mode=mode,
        ).start()  # fmt: skip
        if name == "killed":
            run.until_step(6)
            run.kill(1)
        run.ended()
        assert len(run.status()["recoveries"]) == (1 if name == "killed" else 0), run.tail()
        digests[name] = digest(tmp_path / name)
        for part in _local_parts(tmp_path / name):
            check_partition(mode, part)
    assert digests["killed"] == digests["undisturbed"]
