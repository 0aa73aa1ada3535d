"""A script that ends each job before the training's last step gets on in a chain of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

SCRIPT = [str(SCRIPTS / "chain.py"), "--max-steps", "20", "--save-steps", "50"]


def test_three_launches_end_in_the_weights_of_three_jobs_of_torchrun(runs: Runs, tmp_path: Path) -> None:
    """The callback counts the steps of its job, and a kill in the second job changes nothing. The run has
    finished when the script has taken the last step. A new run goes on from where the script says.
    """
    jobs = tmp_path / "torchrun"
    jobs.mkdir()
    for _ in range(3):
        plain_ranks(jobs, [*SCRIPT, "--output-dir", "out", "--resume"], ranks=2)
    run = runs("--nproc-per-node", "2", *SCRIPT, "--output-dir", "out")
    run.start().ended()
    assert "Finished at step 8 of 20" in run.printed()
    with run.held(after=3):
        run.start().until_step(11)
        run.kill(1)
    run.ended()
    assert "at step 8 of 20. It runs again and decides how to go on" in run.printed()
    assert len(run.status()["recoveries"]) == 1
    run.start().ended()
    assert run.status()["step"] == 20
    assert digest(tmp_path / "out") == digest(jobs / "out")
    run.start().ended()
    assert f"run {run.status()['run_id']} has finished" in run.printed()


@pytest.mark.full
def test_a_new_run_goes_on_from_a_checkpoint_at_which_the_script_had_stopped(
    runs: Runs, tmp_path: Path
) -> None:
    """The script names the checkpoint, as under torchrun; one rank asks for the stop."""
    command = ["--nproc-per-node", "2", *SCRIPT, "--output-dir", "out", "--resume", "--stop-on-rank", "1"]
    runs(*command).start().ended()
    assert (tmp_path / "out" / "checkpoint-9").is_dir()
    second = runs("--fresh", *command, name="second").start().ended()
    assert "Finished at step 18 of 20" in second.printed()
