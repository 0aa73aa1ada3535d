"""The recipe `memgen-arithmetic`: a small one that is killed in each stage, and the packaged one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.memgen_answers import answered, evaluated
from support.runs import Run

from grpo_run.trainers.recipes import chains

SMALL = {
    "sft.max_steps": 4, "sft.save_steps": 2, "sft.per_device_train_batch_size": 4, "sft.logging_steps": 1,
    "weaver.max_steps": 4, "weaver.save_steps": 2, "weaver.per_device_train_batch_size": 2,
    "weaver.logging_steps": 1, "grpo.max_steps": 4, "grpo.save_steps": 2,
    "grpo.per_device_train_batch_size": 8, "grpo.max_completion_length": 8,
    "memgen.evaluation_problems": 12, "memgen.evaluation_batch_size": 1,
}  # fmt: skip
"""A few steps of each stage, and many short batches of the evaluation."""
LINES = 1 + 3 * 12
"""The settings, and 12 batches of each of three variants."""
LOADED = 50
"""Problems that are answered again by what is loaded."""


def recipe(folder: Path, settings: dict[str, object], *options: str, name: str = "run") -> Run:
    output = folder / f"{name}-output"
    words = [f"--set={key}={value}" for key, value in {**settings, "output_dir": output}.items()]
    module = ["-m", "grpo_run.trainers.recipes", "memgen-arithmetic"]
    return Run(folder, [*options, *module, *words], name=name)


def lines_of(output: Path) -> list[str]:
    """Return the whole lines of the evaluation's file so far."""
    file = output / "evaluation.jsonl"
    return file.read_text().split("\n")[:-1] if file.exists() else []


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("calls", [pytest.param((2,), id="one"), pytest.param((1, 2, 3), id="each")])
def test_a_recipe_killed_in_a_training_and_in_the_evaluation_ends_like_the_undisturbed_one(
    calls: tuple[int, ...], tmp_path: Path
) -> None:
    """Trainings go on from their snapshots, and the evaluation from its last batch, which nothing repeats."""
    undisturbed = recipe(tmp_path, SMALL, name="undisturbed").start()
    killed = recipe(tmp_path, SMALL, name="killed").start()
    for attempt, call in enumerate(calls, 1):
        killed.until_step(2, train_call=call, timeout_seconds=90)
        killed.kill(0)
        killed.until_event("attempt_started", attempt=attempt, timeout_seconds=90)
    output = tmp_path / "killed-output"
    deadline = time.monotonic() + 90
    while len(before := lines_of(output)) < 3:
        assert time.monotonic() < deadline, killed.tail()
        time.sleep(0.005)
    killed.kill(0)
    killed.ended()
    undisturbed.ended()

    lines = lines_of(output)
    assert len(before) < LINES, "the kill came after the evaluation"
    assert lines[: len(before)] == before
    assert len(lines) == LINES
    expected = tmp_path / "undisturbed-output"
    assert lines == lines_of(expected)
    for name in (
        "experiment.json",
        *(f"final/{part}/adapter_model.safetensors" for part in ("weaver", "trigger")),
    ):
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_trigger_learns_where_memory_helps(tmp_path: Path, seed: int) -> None:
    """On 1,000 held-out problems, the trained trigger beats one that always weaves, and that beats no memory,
    by at least 3 points each; and it fires after `#` rather than after other operations. What is loaded
    answers as in the evaluation on two ranks.
    """
    recipe(tmp_path, {"seed": seed}, "--nproc-per-node", "2").start().ended(timeout_seconds=1400)
    output = tmp_path / "run-output"
    found = json.loads((output / "experiment.json").read_text())
    accuracy, fired = found["accuracy"], found["firing_by_delimiter"]
    assert found["problems"] == 1000
    assert accuracy["inactive"] >= accuracy["baseline"] + 0.03
    assert accuracy["trained"] >= accuracy["inactive"] + 0.03
    assert fired["#"] > max(fired[easy] for easy in "+-=")
    asked = [chain.prompt for chain in chains.chains("held out", LOADED, held_out=True)]
    in_evaluation = {variant: rows[:LOADED] for variant, rows in evaluated(output).items()}
    assert answered(output, asked) == in_evaluation
    assert {woven for row in in_evaluation["trained"] for _, woven in row["delimiters"]} == {False, True}
