"""A run whose rollouts grow past what fits splits its micro-batches before memory runs out, and ends in the
same weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.memory_plans import ROUNDING, plans_of
from support.references import plain_ranks
from support.runs import SCRIPTS, Run, Runs, digest
from support.weights import relative_difference

from grpo_run.watchdog.observation import Phase

STEPS = 8
ROWS = 6
LIMIT = ["--inject", "oom@rank1:step1:phase=backward:tokens=130"]
"""Whole micro-batches fit up to a length of 21, which the fourth rollout exceeds; the longest has 44."""


def growing(*words: str) -> list[str]:
    """The script and its arguments, without the output directory."""
    return [
        str(SCRIPTS / "growing.py"), "--max-steps", str(STEPS), "--save-steps", "2", "--logging-steps", "1",
        "--per-device-train-batch-size", str(ROWS), "--num-generations", "3", *words,
    ]  # fmt: skip


def launched(
    runs: Runs, output: Path, *options: str, words: tuple[str, ...] = (), name: str = "run", mode: str = ""
) -> Run:
    """Run it on two ranks under grpo-run."""
    return runs(
        "--nproc-per-node", "2", *options, *growing(*words), "--output-dir", str(output), name=name, mode=mode
    ).start().ended()  # fmt: skip


def undisturbed(folder: Path, *words: str) -> Path:
    """Train without grpo-run and without a limit, and return the output directory."""
    plain_ranks(folder, [*growing(*words), "--output-dir", "reference"], ranks=2)
    return folder / "reference"


def check_fits(run: Run) -> None:
    """Hold that memory never ran out and no plan was needed, although micro-batches had to be split."""
    assert not [one for one in run.events("fault_injected") if one["kind"] == "oom"], run.tail()
    assert not [one for one in run.events("incident") if one["cause"] == "gpu_oom"], run.tail()
    assert not plans_of(run)
    split = run.events("micro_batches_split")
    assert split, run.tail()
    assert split[0]["predicted_bytes"] > split[0]["limit_bytes"] >= split[0]["predicted_split_bytes"]
    assert {one["decided_by"] for one in split} == {1}


def logged(output: Path) -> list[dict[str, float]]:
    """What rank 0 has logged of the learning in each step."""
    entries = json.loads((output / "logged-rank0.json").read_text())
    names = ("loss", "grad_norm", "reward", "completions/mean_length", "clip_ratio/region_mean")
    return [{name: one[name] for name in names} for one in entries if "reward" in one]


def test_rollouts_that_outgrow_the_limit_are_trained_in_pieces_also_after_a_kill(
    runs: Runs, tmp_path: Path
) -> None:
    """The rank that is killed is in a split step, which is done again in the same pieces."""
    expected = undisturbed(tmp_path)
    run = launched(runs, tmp_path / "out", *LIMIT, "--inject", "kill@rank0:step6")
    check_fits(run)
    assert [one["cause"] for one in run.events("incident")] == ["signal"]
    assert relative_difference(tmp_path / "out", expected) <= ROUNDING
    found, plain = logged(tmp_path / "out"), logged(expected)
    assert len(found) == len(plain) == STEPS
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)


CASES: dict[str, tuple[str, ...]] = {
    "rloo": ("--rloo", "--settings", '{"beta": 0.05}'),
    "reference model": ("--settings", '{"beta": 0.1}'),
    "dapo": ("--settings", '{"loss_type": "dapo"}'),
    "two steps and two iterations of a rollout": (
        "--steps-per-generation", "2", "--num-iterations", "2", "--save-inside-rollouts", "--growth", "12",
    ),
    "accumulated": ("--gradient-accumulation-steps", "2", "--steps-per-generation", "4",
    "--save-inside-rollouts", "--growth", "9"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_kill_in_any_split_step_changes_no_bit(name: str, step: int, runs: Runs, tmp_path: Path) -> None:
    """Of the run with the limit; the run without it differs by the rounding of sums."""
    expected = undisturbed(tmp_path, *CASES[name])
    whole = launched(runs, tmp_path / "out", *LIMIT, words=CASES[name])
    check_fits(whole)
    assert relative_difference(tmp_path / "out", expected) <= ROUNDING
    kill = f"kill@rank{step % 2}:step{step}"
    killed = launched(runs, tmp_path / "killed", *LIMIT, "--inject", kill, words=CASES[name], name="killed")
    check_fits(killed)
    assert digest(tmp_path / "killed") == digest(tmp_path / "out")


@pytest.mark.full
def test_switched_off_memory_runs_out_and_the_plan_is_changed(runs: Runs, tmp_path: Path) -> None:
    run = launched(runs, tmp_path / "out", *LIMIT, "--no-memory-forecast")
    assert plans_of(run) == [{"micro_batch_divisor": 2}]
    assert not run.events("micro_batches_split")
    assert not (run.directory / "memory_forecast").exists()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp2"])
def test_sharded_models_are_warned_of_and_not_split(mode: str, runs: Runs, tmp_path: Path) -> None:
    """Then memory runs out, and the plan is changed as without a forecast."""
    run = launched(runs, tmp_path / "out", *LIMIT, mode=mode)
    assert not run.events("micro_batches_split")
    warned = [one["text"] for one in run.events("warning") if "may run out of GPU memory" in one["text"]]
    assert warned
    assert "the model is sharded" in warned[0]
    assert plans_of(run)[0] == {"micro_batch_divisor": 2}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("return@rank1:step3", "collective_missing_rank"),
        ("exit@rank1:step3", "rank_exited_early"),
        (f"exception@rank1:step3:phase={Phase.generate.name}", "exception"),
        (f"hang@rank1:step3:phase={Phase.generate.name}", "generation_stall"),
        ("skip@rank1:step4", "collective_mismatch"),
    ],
)
def test_ranks_that_wait_for_a_decision_are_found(fault: str, cause: str, runs: Runs, tmp_path: Path) -> None:
    """One rank waits for what another needs, which never says so; the memory suffices here."""
    ample = ["--inject", "oom@rank0:step1:phase=backward:tokens=100000"]
    run = launched(runs, tmp_path / "out", *ample, "--inject", fault, "--deadline-floor", "5")
    assert [one["cause"] for one in run.events("incident")] == [cause], run.tail()
    assert not run.events("micro_batches_split")
