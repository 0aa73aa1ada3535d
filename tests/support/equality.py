"""One cell of the equality matrix: a short run over two epochs, killed at every step, and its reference.

A cell names a trainer, a parallelism mode and the geometry of rollouts and optimizer steps. The dataset is so
small that two epochs are about eight optimizer steps; a rollout serves several of them, and each epoch leaves
out other prompts. The digest of the final weights and every line that the Trainer logged are compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_run.runtime.launch.accelerate import load_parallelism
from support.references import plain_ranks, torchrun
from support.runs import CONFIGS, SCRIPTS, Runs, digest

ROOT = CONFIGS.parent.parent
MODES = ("ddp-1", "ddp", "zero2", "zero3", "fsdp2")
"""`ddp-1` is one rank; the others have two."""
BATCH_SIZE, GENERATIONS, LONGEST = 4, 4, 12
"""Samples per micro-batch and rank, completions per prompt, maximum optimizer steps per cell."""
CLOCKED = (
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)
"""Logged values that depend on the clock."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A trainer, its mode and its geometry.

    `settings` are further arguments of the trainer's configuration.
    """

    algorithm: str
    mode: str
    steps_per_generation: int
    num_iterations: int
    accumulation: int
    ranks_asked: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    remaining_prompts: int = 1
    kills: tuple[int, ...] | None = None
    """Steps at which a rank is killed; every step by default."""
    name_of_settings: str = ""

    def __str__(self) -> str:
        geometry = f"{self.steps_per_generation}-{self.num_iterations}-{self.accumulation}"
        return "-".join(part for part in (self.algorithm, self.mode, geometry, self.name_of_settings) if part)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.ranks_asked or (1 if self.mode == "ddp-1" else 2)

    @property
    def texts(self) -> int:
        """Number of samples without rollouts: three full optimizer steps, a partial one, and one sample."""
        return BATCH_SIZE * self.ranks * (3 * self.accumulation + 1) + 1

    @property
    def rollouts_per_epoch(self) -> int:
        """Enough for three full optimizer steps and a partial one."""
        return -(-(3 * self.accumulation + 1) // (self.steps_per_generation * self.num_iterations))

    @property
    def prompts(self) -> int:
        """Size of the dataset; each epoch leaves some prompts out."""
        per_rollout = BATCH_SIZE * self.ranks * self.steps_per_generation // GENERATIONS
        return per_rollout * self.rollouts_per_epoch + min(self.remaining_prompts, per_rollout - 1)

    @property
    def steps(self) -> int:
        """Optimizer steps of two epochs, limited to `LONGEST`."""
        micro_steps = self.rollouts_per_epoch * self.steps_per_generation * self.num_iterations
        if self.algorithm == "sft":
            micro_steps = -(-self.texts // (BATCH_SIZE * self.ranks))
        return min(2 * -(-micro_steps // self.accumulation), LONGEST)

    @property
    def words(self) -> list[str]:
        """The script and its arguments, without the output directory."""
        words = [
            str(SCRIPTS / f"{self.algorithm}.py"), "--max-steps", str(self.steps), "--save-steps", "1",
            "--logging-steps", "1", "--per-device-train-batch-size", str(BATCH_SIZE),
            "--gradient-accumulation-steps", str(self.accumulation), "--settings", json.dumps(self.settings),
            *self.arguments,
        ]  # fmt: skip
        if self.algorithm == "sft":
            return [*words, "--texts", str(self.texts)]
        return [
            *words, "--save-inside-rollouts", "--prompts", str(self.prompts),
            "--num-generations", str(GENERATIONS), "--steps-per-generation", str(self.steps_per_generation),
            "--num-iterations", str(self.num_iterations),
        ]  # fmt: skip


def warm_reference(cell: Cell, folder: Path) -> Path:
    """Train the cell in plain ranks without grpo-run, in DDP, and return its output directory."""
    output = folder / "plain"
    plain_ranks(folder, [*cell.words, "--output-dir", str(output)], ranks=cell.ranks)
    return output


def reference(cell: Cell, folder: Path) -> Path:
    """Train the cell under torchrun and return its output directory."""
    output = folder / "torchrun"
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cell.mode != "ddp-1":
        parallelism = load_parallelism(
            Path("tests") / "configs" / f"{cell.mode}.yaml",
            nproc_per_node=cell.ranks,
            nnodes=1,
            has_accelerator=cell.mode == "fsdp2",  # the shim makes it take effect
        )
        variables |= parallelism.environment
    if cell.mode == "fsdp2":
        variables["TEST_FSDP_ON_CPU"] = "1"
    words = ["--standalone", "--nproc-per-node", str(cell.ranks), *cell.words, "--output-dir", str(output)]
    try:
        torchrun(ROOT, words, environment=variables, timeout_seconds=240)
    except AssertionError:
        if not (
            output / "weights.sha256"
        ).exists():  # otherwise torch aborted at process exit, after the script
            raise
    return output


def supervised(cell: Cell, folder: Path, runs: Runs, *, kills: bool) -> Path:
    """Train the cell under `grpo-run launch`, with a rank killed at every step or at none.

    Return its output directory.
    """
    name = "killed" if kills else "undisturbed"
    steps = (cell.kills or range(1, cell.steps + 1)) if kills else ()
    injections = [word for step in steps for word in ("--inject", f"kill@rank{step % cell.ranks}:step{step}")]
    run = runs(
        *injections, "--nproc-per-node", str(cell.ranks), *cell.words, "--output-dir", str(folder / name),
        name=f"run-{name}", cwd=ROOT, mode="" if cell.mode == "ddp-1" else cell.mode,
    ).start().ended(timeout_seconds=400)  # fmt: skip
    assert len(run.events("fault_injected")) == len(list(steps)), run.tail()
    return folder / name


def logged(output: Path, steps: int) -> list[dict[str, Any]]:
    """Return every line the Trainer logged up to the last checkpoint, without values from the clock."""
    state = json.loads((output / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return [
        {key: value for key, value in line.items() if key not in CLOCKED} for line in state["log_history"]
    ]


def differences(cell: Cell, found: Path, expected: Path) -> list[str]:
    """Describe each difference between the run in `found` and the one in `expected`."""
    theirs, ours = logged(expected, cell.steps), logged(found, cell.steps)
    different = []
    for ours_line, theirs_line in zip(ours, theirs, strict=False):
        # compare text, so that NaN equals NaN
        for key in sorted(ours_line.keys() | theirs_line.keys()):
            if repr(ours_line.get(key)) != repr(theirs_line.get(key)):
                different.append(
                    f"step {theirs_line['step']}: {key} is {ours_line.get(key)}, not {theirs_line.get(key)}"
                )
    if len(ours) != len(theirs):
        different.append(f"{len(ours)} lines were logged, not {len(theirs)}")
    if digest(found) != digest(expected):
        different.append(f"the weights end as {digest(found)[:12]}, not {digest(expected)[:12]}")
    return different


def row(cell: Cell, different: list[str], seconds: float) -> str:
    """Return one line of the campaign's table."""
    verdict = "equal" if not different else different[0]
    return (
        f"| {cell.algorithm} | {cell.mode} | {cell.steps_per_generation} | {cell.num_iterations} |"
        f" {cell.accumulation} | {cell.name_of_settings or '-'} | {len(cell.kills or range(cell.steps))} |"
        f" {verdict} | {seconds:.0f} s |"
    )
