"""A restarted script that does not start like the first time continues where it was, or says that it
cannot.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

SCRIPT = str(SCRIPTS / "odd_starts.py")
STEPS = ("--max-steps", "5", "--save-steps", "2", "--save-inside-rollouts")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights of a plain run without a fault."""
    folder = tmp_path_factory.mktemp("plain")
    plain_ranks(folder, [SCRIPT, "--output-dir", "out", *STEPS], ranks=1)
    return digest(folder / "out")


@pytest.mark.parametrize(
    "start",
    [
        "skips-sft",
        pytest.param("time-stamp", marks=pytest.mark.full),
        pytest.param("clears", marks=pytest.mark.full),
    ],
)
def test_a_script_that_starts_otherwise_continues_where_it_was(
    runs: Runs, tmp_path: Path, undisturbed: str, start: str
) -> None:
    """SFT is skipped, the output directory has the time in its name, or is cleared first."""
    run = runs(SCRIPT, "--output-dir", "out", *STEPS, "--start", start, "--kill-at-step", "4").start().ended()
    assert digest(tmp_path / "out") == undisturbed, run.tail()
    last = run.events("resume_chosen")[-1]
    assert (last["train_call"], last["trainer_class"]) == (2, "GRPOTrainer")
    assert last["step"] >= 2, run.tail()
    assert not any(record["mismatch"] for record in run.events("resume_chosen")), run.tail()
    if start == "clears":
        assert "the script has removed checkpoint-" in run.printed()
    (recovery,) = run.status()["recoveries"]
    assert recovery["lost_steps"] <= 2
    assert not (run.directory / "checkpoint_backups").exists()


@pytest.mark.full
def test_a_run_that_lost_its_place_says_so_and_ends_if_asked(runs: Runs, tmp_path: Path) -> None:
    """The directory has a new random name: nothing proves that it is the same call. Nothing is deleted."""
    run = runs(
        "--require-resume", SCRIPT, "--output-dir", "out", *STEPS, "--start", "random-name", "--kill-at-step",
        "4"
    ).start().ended(93)  # fmt: skip
    assert "starts from step 0, although train() call 1 (SFTTrainer" in run.printed()
    assert run.events("run_ended")[-1]["sentence"]
    assert [path.name for path in (tmp_path / "out").glob("grpo-*/checkpoint-*")]
