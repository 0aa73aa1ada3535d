"""A run killed at every step of two epochs equals the undisturbed run: weights and every logged number.

The reference is a run of the same script without grpo-run: torchrun's in the campaign, and in `make test`
that of plain ranks, which `tests/integration/test_output_in_pipes.py` compares with torchrun's. Cells vary
trainer, parallelism mode and the geometry of rollouts and optimizer steps. A few diagnostic cells run in
`make test`; the matrix is a campaign, with one table row per cell.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import pytest
from support.equality import MODES, Cell, differences, reference, row, supervised, warm_reference
from support.runs import Runs


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository's root: paths of DeepSpeed files in the configurations are relative to it."""
    monkeypatch.chdir(Path(__file__).parents[2])


def geometry(
    algorithm: str, mode: str, numbers: tuple[int, int, int], name: str = "", **more: object
) -> Cell:
    steps_per_generation, num_iterations, accumulation = numbers
    return Cell(
        algorithm=algorithm,
        mode=mode,
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        accumulation=accumulation,
        name_of_settings=name,
        **more,  # type: ignore[arg-type]
    )


DIAGNOSTIC = [
    geometry("grpo", "ddp", (4, 2, 2), kills=(1, 3, 4, 6, 8)),
    geometry("rloo", "ddp-1", (1, 2, 1), kills=(1, 4, 7)),
]
MATRIX = [
    geometry(algorithm, mode, numbers)
    for algorithm, mode, numbers in product(("grpo", "rloo"), MODES, product((1, 4), (1, 2), (1, 2)))
]
WORKERS = {"dataloader_num_workers": 1}
KEPT_WORKERS = {**WORKERS, "dataloader_persistent_workers": True}
SEVERAL_RANKS = {"ddp_find_unused_parameters": False}
VARIANTS = [
    geometry(
        "grpo", "ddp-1", (4, 1, 1), "reference-follows-logs-of-3",
        settings={"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "logging_steps": 3},
    ),
    geometry("grpo", "ddp", (4, 1, 2), "workers", settings=WORKERS),
    geometry("grpo", "ddp", (1, 2, 1), "persistent-workers", settings=KEPT_WORKERS),
    geometry(
        "rloo", "ddp-1", (4, 2, 1), "evaluation-between",
        settings={"eval_strategy": "steps", "eval_steps": 1}, arguments=("--eval-prompts", "2"),
    ),
    geometry("grpo", "ddp", (4, 2, 1), "logs-of-3", settings={"logging_steps": 3}),
    geometry("sft", "ddp-1", (1, 1, 2)),
    geometry("sft", "ddp", (1, 1, 1)),
    geometry("grpo", "ddp", (1, 1, 1), "three-ranks", ranks_asked=3, settings=SEVERAL_RANKS),
    geometry("grpo", "zero2", (1, 1, 1), "three-ranks", ranks_asked=3),
    geometry("grpo", "fsdp2", (1, 1, 1), "three-ranks", ranks_asked=3),
    *(
        geometry(
            "grpo", mode, (1, 2, 1), "reference-follows",
            settings={"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
        )
        for mode in ("ddp", "zero3", "fsdp2")
    ),
]  # fmt: skip


def check(cell: Cell, tmp_path: Path, runs: Runs, expected: Path, *, undisturbed: bool) -> str:
    """Compare the runs of one cell with the reference in `expected` and return its table row."""
    began = time.monotonic()
    different = differences(cell, supervised(cell, tmp_path, runs, kills=True), expected)
    if undisturbed:
        different += differences(cell, supervised(cell, tmp_path, runs, kills=False), expected)
    found = row(cell, different, time.monotonic() - began)
    assert not different, "\n".join([found, *different])
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", DIAGNOSTIC, ids=str)
def test_run_killed_at_several_steps_equals_the_undisturbed_run(
    cell: Cell, tmp_path: Path, runs: Runs
) -> None:
    """They cover the rollout in use, the second epoch and pending logs; every step is in the matrix."""
    check(cell, tmp_path, runs, warm_reference(cell, tmp_path), undisturbed=False)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", [*MATRIX, *VARIANTS], ids=str)
def test_the_matrix(cell: Cell, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Every trainer, mode and geometry; once per mode, the undisturbed supervised run as well."""
    first = (cell.steps_per_generation, cell.num_iterations, cell.accumulation) == (1, 1, 1)
    found = check(cell, tmp_path, runs, reference(cell, tmp_path), undisturbed=first)
    with capsys.disabled():
        print(f"\n{found}")
