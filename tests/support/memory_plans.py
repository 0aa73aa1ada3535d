"""Runs that are short of memory: a rank runs out of it, the plan is changed, and the weights are compared.

Each case is a plain TRL script of `tests/scripts` with two ranks; the reference is the same script
undisturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.references import plain_ranks
from support.runs import CONFIGS, SCRIPTS, Run, Runs, digest
from support.weights import relative_difference

STEPS = 4
ROUNDING = 1e-5
"""By what weights may differ if sums were added in another order, relative, in float32."""
HALVED = {"micro_batch_divisor": 2}
QUARTERED = {"micro_batch_divisor": 4}
CHECKPOINTED = {"gradient_checkpointing": True}
SEGMENTS = {"expandable_segments": True}


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """One case.

    Attributes:
        name: for the table of results.
        inject: texts of `--inject`.
        plans: what each change sets, in order.
        script: of `tests/scripts`.
        batch_size: samples of a micro-batch.
        words: further arguments of the script.
        mode: a parallelism mode of `tests/configs`; empty for DDP.
        exact: the weights are equal bit by bit.
    """

    name: str
    inject: tuple[str, ...]
    plans: tuple[dict[str, Any], ...]
    script: str = "grpo.py"
    batch_size: int = 8
    words: tuple[str, ...] = ()
    mode: str = ""
    exact: bool = False

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def command(self) -> list[str]:
        """The script and its arguments, without the output directory. A rollout serves two optimizer
        steps.
        """
        rollout = ["--steps-per-generation", "2", "--save-inside-rollouts", "--num-generations", "4"]
        return [
            str(SCRIPTS / self.script), "--max-steps", str(STEPS), "--save-steps", "1",
            "--per-device-train-batch-size", str(self.batch_size),
            *([] if self.script == "sft.py" else rollout),
            *self.words,
        ]  # fmt: skip

    def run(self, runs: Runs, output: Path, *options: str, name: str) -> Run:
        """Return a run of the case under grpo-run, not started yet."""
        return runs(
            "--nproc-per-node", "2", *options, *self.command, "--output-dir", str(output), name=name,
            mode=self.mode, cwd=CONFIGS.parent.parent,
        )  # fmt: skip


def reference(case: Shortage, folder: Path, runs: Runs) -> Path:
    """Train the case undisturbed and return the output directory: without grpo-run, where that needs no
    launcher.
    """
    output = folder / "reference"
    if not case.mode:
        plain_ranks(folder, [*case.command, "--output-dir", str(output)], ranks=2)
        return output
    case.run(runs, output, name="reference-run").start().ended()
    return output


def short_of_memory(case: Shortage, runs: Runs, output: Path, *options: str, name: str = "run") -> Run:
    """Return the case as a run with its faults, not started yet."""
    injections = [word for text in case.inject for word in ("--inject", text)]
    return case.run(runs, output, *injections, *options, name=name)


def plans_of(run: Run) -> list[dict[str, Any]]:
    """Return the plans of a run, oldest first."""
    return [event["plan"] for event in run.events("plan_changed")]


def check(case: Shortage, run: Run, output: Path, expected: Path, *, kills: int = 0) -> None:
    """Hold that the plans were those of the case, that no rank skipped a collective, and that the weights are
    equal.
    """
    assert plans_of(run) == list(case.plans), run.tail()
    causes = [event["cause"] for event in run.events("incident")]
    assert causes == ["gpu_oom"] * len(case.plans) + ["signal"] * kills, run.tail()
    assert not run.events("vote_failed"), run.tail()
    actions = [event["action"] for event in run.events("action")]
    assert actions == ["restart_with_plan_change"] * len(case.plans) + ["restart"] * kills, run.tail()
    if case.exact:
        assert digest(output) == digest(expected), run.tail()
    else:
        assert relative_difference(output, expected) <= ROUNDING, run.tail()
