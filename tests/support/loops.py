"""Runs of `tests/scripts/loops.py`, and the numbers that they logged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.references import plain_ranks
from support.runs import SCRIPTS, Run, Runs, digest

SCRIPT = str(SCRIPTS / "loops.py")
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""} if Path("/dev/nvidiactl").exists() else {}
"""Hides GPUs from ranks. Without any it is empty, because a launch with another value than this process
starts cold.
"""


def launched(
    runs: Runs, folder: Path, *words: str, ranks: int = 1, options: Iterable[str] = (), name: str = "run"
) -> Run:
    """Return the run of the script under `grpo-run launch`, not started yet."""
    return runs(
        *options, "--nproc-per-node", str(ranks), SCRIPT, "--output-dir", str(folder / "out"), *words,
        name=name, environment=ON_CPU,
    )  # fmt: skip


def undisturbed(folder: Path, *words: str, ranks: int = 1) -> Path:
    """Run the script without grpo-run and return its output directory."""
    (folder / "plain").mkdir()
    plain_ranks(folder / "plain", [SCRIPT, "--output-dir", "out", *words], ranks=ranks)
    return folder / "plain" / "out"


def logged(output: Path) -> dict[tuple[int, int], Any]:
    """Return what each rank logged at each step; after a recovery, the last line of a step."""
    lines: dict[tuple[int, int], Any] = {}
    for path in sorted(output.glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        for line in path.read_text().splitlines():
            if line:
                values = json.loads(line)
                lines[rank, values["step"]] = values
    return lines


def differences(found: Path, expected: Path) -> list[str]:
    """Describe how the numbers and the end of a run differ from those of another."""
    ours, theirs = logged(found), logged(expected)
    different = [
        f"rank {rank} step {step}: {ours.get((rank, step))}, not {theirs.get((rank, step))}"
        for rank, step in sorted(ours.keys() | theirs.keys())
        if ours.get((rank, step)) != theirs.get((rank, step))
    ]
    if digest(found) != digest(expected):
        different.append("the weights differ")
    return different


def kills(steps: Iterable[int], ranks: int) -> list[str]:
    """Return the options that kill a rank at the start of each of these steps, counted from 1."""
    return [word for step in steps for word in ("--inject", f"kill@rank{step % ranks}:step{step}")]
