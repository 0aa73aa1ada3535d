"""Every parallelism mode trains under supervision on CPU and resumes to the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.partition import check_partition
from support.runs import CONFIGS, SCRIPTS, Run, digest

ROOT = CONFIGS.parent.parent
FSDP = {"TEST_FSDP_ON_CPU": "1"}
STEPS = ("--max-steps", "12", "--save-steps", "4", "--record-partition")


def _local_parts(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads((output_dir / f"partition-rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "mode",
    [
        "zero3",
        "fsdp2",
        pytest.param("ddp", marks=pytest.mark.full),
        pytest.param("zero2", marks=pytest.mark.full),
    ],
)
def test_mode_survives_a_kill_with_equal_weights(mode: str, runs: Callable[..., Run], tmp_path: Path) -> None:
    """The undisturbed and the killed run end with the same weights, and the model is partitioned in both."""
    digests = {}
    for name in ("undisturbed", "killed"):
        run = runs(
            # on CPU, FSDP takes effect through the scripts' shim, which the launcher cannot detect
            *(("--allow-untested",) if mode == "fsdp2" else ()),
            "--accelerate-config", str(CONFIGS / f"{mode}.yaml"), "--nproc-per-node", "2",
            str(SCRIPTS / "grpo.py"), "--output-dir", str(tmp_path / name), *STEPS,
            name=f"run-{name}", environment=FSDP if mode == "fsdp2" else None, cwd=ROOT,
        ).start()  # fmt: skip
        if name == "killed":
            run.until_step(6)
            run.kill(1)
        assert run.wait(240) == 0, run.tail()
        assert len(run.status()["recoveries"]) == (1 if name == "killed" else 0), run.tail()
        digests[name] = digest(tmp_path / name)
        for part in _local_parts(tmp_path / name):
            check_partition(mode, part)
    assert digests["killed"] == digests["undisturbed"]
