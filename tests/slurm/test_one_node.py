"""`examples/slurm/one-node.sbatch` and `singleton-chain.sbatch`, as they stand, under a real Slurm."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.slurm import Cluster, Job
from support.trainer_and_loop import TRAINER

pytestmark = pytest.mark.full
FILES = Path(__file__).parents[2] / "examples" / "slurm"
ONE, CHAIN = str(FILES / "one-node.sbatch"), str(FILES / "singleton-chain.sbatch")
STEPS, HELD = 16, 10
ARGUMENTS = ("--output-dir", "ours", "--max-steps", str(STEPS), "--save-steps", "4", "--cpu")
TRAIN = (str(SCRIPTS / TRAINER), *ARGUMENTS)
SIZE = ("--gpus-per-node=2",)
SOON = ("--time=2", "--signal=USR1@30")
"""Slurm then sends the signal 30 to 90 s after the start, in a run of `LONG_STEPS` that takes longer."""
LONG_STEPS = 80
LONG = (
    str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", str(LONG_STEPS), "--step-seconds", "1",
    "--cpu",
)  # fmt: skip
KILL_WAIT_SECONDS = 30.0


def _stopped(slurm: Cluster, *, why: str = "SIGTERM", count: int = 1, least: int = HELD - 1) -> int:
    """Wait until the run was asked to stop so often, then let it go on, and return the step of its
    checkpoint.
    """
    run = slurm.run()
    run.until(lambda events: [e for e in events if e["event"] == "stop_requested"][count - 1 :], 150.0)
    (slurm.folder / "hold").unlink(missing_ok=True)
    run.until(lambda events: [e for e in events if e["event"] == "run_ended"][count - 1 :], KILL_WAIT_SECONDS)
    assert run.events("stop_requested")[count - 1]["why"] == why
    status = run.status()
    assert status["state"] == "stopped"
    assert Path(status["checkpoint"]["path"]).is_dir()
    assert status["checkpoint"]["step"] == status["step"] >= least
    return int(status["step"])


def _held(slurm: Cluster, *words: str) -> Job:
    """Submit a job, and wait until it is held at a step."""
    (slurm.folder / "hold").write_text(str(HELD))
    job = slurm.submit(*words)
    job.until_state("RUNNING")
    slurm.run().until_step(HELD - 1)
    return job


def _exact(slurm: Cluster, stopped_at: int, steps: int = STEPS) -> None:
    """The run has gone on from the step of its checkpoint, and ended in the weights of an undisturbed run."""
    run = slurm.run()
    assert run.events("train_started")[-1]["step"] == stopped_at
    assert run.events("incident") == []
    assert digest(slurm.folder / "ours") == undisturbed(TRAINER, steps)


@pytest.mark.timeout(500)
def test_the_time_limit_requeues_with_a_checkpoint(slurm: Cluster) -> None:
    """The signal makes one checkpoint, code 75 a requeue, and the next job goes on from it."""
    job = slurm.submit(*SIZE, *SOON, ONE, *LONG)
    job.until_state("RUNNING")
    step = _stopped(slurm, why="SIGUSR1", least=1)
    # the second job has the same limit, and may need a third one
    job.ended(timeout_seconds=400)
    run = slurm.run()
    asked = run.events("stop_requested")
    assert job.restarts == len(run.events("run_started")) - 1 >= 1
    assert len(asked) - job.restarts in (0, 1)  # one may come after the last step, before the run has ended
    assert [call["step"] for call in run.events("train_started") if call["rank"] == 0][:2] == [0, step]
    _exact(slurm, run.events("train_started")[-1]["step"], LONG_STEPS)


def test_the_files_name_the_time_that_slurm_leaves(slurm: Cluster) -> None:
    """The cluster has Slurm's default; `--stop-timeout` fits into the time of `--signal`."""
    assert f"KillWait                = {KILL_WAIT_SECONDS:.0f} sec" in slurm.call(
        "scontrol", "show", "config"
    )
    for file in FILES.glob("*.sbatch"):
        text = file.read_text()
        assert f"KillWait ({KILL_WAIT_SECONDS:.0f} s by default)" in text
        (ahead,), (stop,) = (re.findall(name, text) for name in (r"=USR1@(\d+)", r"--stop-timeout (\d+) "))
        assert int(stop) < int(ahead)


def test_scancel_leaves_a_checkpoint(slurm: Cluster) -> None:
    """It is made within KillWait. The job is not requeued; the same job again goes on from it."""
    job = _held(slurm, *SIZE, ONE, *TRAIN)
    job.cancel()
    step = _stopped(slurm)
    job.ended("CANCELLED")
    assert job.restarts == 0
    job.until_printed("Stopped at step")
    slurm.submit(*SIZE, ONE, *TRAIN).ended()
    _exact(slurm, step)


@pytest.mark.parametrize("slurm", ["linuxproc"], indirect=True)
def test_where_slurm_signals_ranks_themselves_the_newest_snapshot_is_kept(slurm: Cluster) -> None:
    """`proctrack/linuxproc` ends the ranks with SIGTERM: nothing newer can be saved, and nothing is wrong."""
    job = _held(slurm, *SIZE, ONE, *TRAIN)
    job.requeue()
    assert job.ended()["Restarts"] == "1"
    assert digest(slurm.folder / "ours") == undisturbed(TRAINER, STEPS)


def test_preemption_keeps_every_step(slurm: Cluster) -> None:
    """A job of a partition with priority takes the nodes; the run goes on when they are free again."""
    job = _held(slurm, *SIZE, "--nodelist=node0", ONE, *TRAIN)
    (slurm.folder / "short.sbatch").write_text("#!/bin/sh\nsleep 1\n")
    urgent = slurm.submit("--partition=urgent", *SIZE, "--nodelist=node0", "short.sbatch")
    step = _stopped(slurm)
    urgent.ended()
    assert job.ended()["Restarts"] == "1"
    _exact(slurm, step)


def test_a_termination_during_the_save_changes_nothing(slurm: Cluster) -> None:
    """The time limit is reached while the signal's checkpoint is being saved: KillWait is left for it."""
    script = str(SCRIPTS / "slow_saves.py")
    (slurm.folder / "hold").write_text(str(HELD))
    job = slurm.submit(*SIZE, ONE, script, *ARGUMENTS)
    job.until_state("RUNNING")
    run = slurm.run()
    run.until_step(HELD - 1)
    (slurm.folder / "hold-save").touch()
    (slurm.folder / "saving").unlink()
    job.cancel("--signal=USR1")
    run.until_event("stop_requested")
    (slurm.folder / "hold").unlink()
    run.until(lambda events: (slurm.folder / "saving").exists())
    job.requeue()
    time.sleep(5)
    (slurm.folder / "hold-save").unlink()
    run.until_event("run_ended", timeout_seconds=KILL_WAIT_SECONDS)
    step = run.status()["step"]
    assert run.status()["checkpoint"]["step"] == step >= HELD - 1
    assert job.ended()["Restarts"] == "1"
    _exact(slurm, step)


def test_a_stop_that_takes_longer_than_killwait_is_killed_and_goes_on(slurm: Cluster) -> None:
    """Nothing of it is on disk but the checkpoints that were there."""
    job = _held(slurm, *SIZE, ONE, *TRAIN)
    job.requeue()
    job.until_printed("grpo-run: run ", count=2)
    (slurm.folder / "hold").unlink()
    assert job.ended()["Restarts"] == "1"
    assert len(slurm.run().events("run_ended")) == 1
    assert slurm.run().events("train_started")[-1]["step"] >= 8
    assert digest(slurm.folder / "ours") == undisturbed(TRAINER, STEPS)


def test_another_node_continues_without_what_the_first_one_had(slurm: Cluster) -> None:
    """Memory and disk of the first node are not there."""
    job = _held(slurm, *SIZE, "--exclude=node1,node2", ONE, *TRAIN)
    job.requeue()
    slurm.call("scontrol", "update", f"jobid={job.number}", "excnodelist=node0")
    step = _stopped(slurm)
    assert job.ended()["NodeList"] in ("node1", "node2")
    _exact(slurm, step)


def test_a_run_directory_on_the_disk_of_the_node_is_not_needed_by_another(slurm: Cluster) -> None:
    """The checkpoints in the output directory suffice: the run is known by its command."""
    (slurm.folder / "hold").write_text(str(HELD))
    local = ("--run-dir", str(slurm.nodes[0].disk / "run"))
    job = slurm.submit(*SIZE, "--exclude=node1,node2", ONE, *local, *TRAIN)
    job.until(lambda job: (slurm.folder / "ours" / "checkpoint-8" / "MANIFEST.json").exists())
    job.requeue()
    slurm.call("scontrol", "update", f"jobid={job.number}", "excnodelist=node0")
    job.until_printed("SIGTERM: stopping")
    (slurm.folder / "hold").unlink()
    assert job.ended()["NodeList"] in ("node1", "node2")
    (step,) = set(re.findall(r"Stopped at step (\d+)", job.printed()))
    assert f"/snapshot-{step}\n" in job.printed() or f"/checkpoint-{step}\n" in job.printed()
    assert digest(slurm.folder / "ours") == undisturbed(TRAINER, STEPS)


@pytest.mark.parametrize(
    ("words", "code"), [((*TRAIN, "--no-such-option"), 93), (("missing.py",), 2)], ids=["93", "2"]
)
def test_what_would_fail_again_is_not_requeued(slurm: Cluster, words: tuple[str, ...], code: int) -> None:
    """Slurm shows the code."""
    shown = slurm.submit(*SIZE, ONE, *words).ended("FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == (f"{code}:0", "0")


def test_a_chain_ends_when_the_run_has_finished(slurm: Cluster) -> None:
    """The second job goes on from the checkpoint of the first, and cancels the third."""
    (slurm.folder / "hold").write_text(str(HELD))
    first, second, third = (slurm.submit(*SIZE, CHAIN, *TRAIN) for _ in range(3))
    first.until_state("RUNNING")
    slurm.run().until_step(HELD - 1)
    assert second.state == third.state == "PENDING"
    first.cancel("--signal=USR1")  # as Slurm does before the time limit
    step = _stopped(slurm, why="SIGUSR1")
    assert first.ended("FAILED")["ExitCode"] == "75:0"
    second.ended()
    third.ended("CANCELLED")
    assert third.printed() == ""
    _exact(slurm, step)


def test_a_chain_ends_with_a_failure_that_would_come_again(slurm: Cluster) -> None:
    """No further job starts after 93."""
    first, second = (slurm.submit(*SIZE, CHAIN, *TRAIN, "--no-such-option") for _ in range(2))
    assert first.ended("FAILED")["ExitCode"] == "93:0"
    second.ended("CANCELLED")
