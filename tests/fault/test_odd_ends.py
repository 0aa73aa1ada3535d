"""A run is finished when its script is, however it ends; and it finishes at the right step."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import SCRIPTS, Runs

SCRIPT = str(SCRIPTS / "odd_ends.py")
STEPS = ("--max-steps", "4", "--save-steps", "2")


@pytest.mark.full
def test_a_trainer_in_a_callback_is_a_part_of_the_outer_step(runs: Runs, tmp_path: Path) -> None:
    """The run finishes at its own step. After a kill, the inner calls of the repeated steps are made
    again.
    """
    run = runs(
        "--inject", "kill@rank0:step4", "--snapshot-every", "1", SCRIPT, "--output-dir", "out", *STEPS,
        "--end", "inner"
    ).start().ended()  # fmt: skip
    assert "Finished at step 4 of 4, 1 fault recovered." in run.printed()
    assert "belongs to the step of the outer call" in run.printed()
    probes = [line.split() for line in (tmp_path / "out" / "probes.txt").read_text().splitlines()]
    assert {step for step, _ in probes} == {"2", "4"}
    assert len({tuple(probe) for probe in probes}) == 2, (
        "an inner call that is repeated gives the same result"
    )
    assert {event["train_call"] for event in run.events("step_committed")} == {1}


def test_a_script_that_leaves_by_os_exit_after_training_is_finished(runs: Runs) -> None:
    """With a warning, because nobody saw its last line."""
    run = (
        runs("--nproc-per-node", "2", SCRIPT, "--output-dir", "out", *STEPS, "--end", "os-exit")
        .start()
        .ended()
    )
    assert "Finished at step 4 of 4, no faults." in run.printed()
    assert (
        "exited with code 0 after its last train() call, without running the script's last line"
        in run.printed()
    )


@pytest.mark.full
def test_a_script_that_destroys_its_process_group_and_frees_ddp_ends(runs: Runs) -> None:
    """torch's destructor of the group would run while it holds the GIL; the group is kept until the process
    exits.
    """
    run = (
        runs("--nproc-per-node", "2", SCRIPT, "--output-dir", "out", *STEPS, "--end", "destroyed")
        .start()
        .ended()
    )
    assert "Finished at step 4 of 4, no faults." in run.printed()
