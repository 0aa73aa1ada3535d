"""`examples/slurm/several-nodes.sbatch` as it stands, on two of three hosts of a real Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest
from support.slurm import Cluster, Job
from support.trainer_and_loop import TRAINER

pytestmark = pytest.mark.full
FILE = str(Path(__file__).parents[2] / "examples" / "slurm" / "several-nodes.sbatch")
STEPS, HELD = 16, 10
TRAIN = (
    str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", str(STEPS), "--save-steps", "4", "--cpu"
)  # fmt: skip
SIZE = ("--nodes=2", "--gpus-per-node=1")
WAIT = {"PET_RDZV_CONF": "join_timeout=20"}
"""So long hosts wait for one another; 600 s by default."""


def _held(slurm: Cluster, *words: str) -> tuple[Job, list[Run]]:
    """Submit a job on the first two hosts, and wait until it is held at a step."""
    (slurm.folder / "hold").write_text(str(HELD))
    job = slurm.submit(*SIZE, *words, FILE, *TRAIN, environment=WAIT)
    job.until_state("RUNNING")
    runs = [slurm.run(host) for host in slurm.nodes[:2]]
    for run in runs:
        run.until_step(HELD - 1)
    return job, runs


def _ended(slurm: Cluster, job: Job, *, restarts: int = 1) -> dict[str, str]:
    """The job ends in the weights of an undisturbed run, after so many requeues."""
    (slurm.folder / "hold").unlink(missing_ok=True)
    shown = job.ended(timeout_seconds=300)
    assert shown["Restarts"] == str(restarts), job.printed()[-6000:]
    assert digest(slurm.folder / "ours") == undisturbed(TRAINER, STEPS)
    return shown


def _stopped(slurm: Cluster, runs: Sequence[Run], why: str) -> int:
    """All hosts stop with one joint checkpoint; return its step."""
    for run in runs:
        run.until_event("stop_requested", why=why)
    (slurm.folder / "hold").unlink()
    for run in runs:
        run.until_event("run_ended", exit_code=75, timeout_seconds=30)
    (step,) = {run.status()["step"] for run in runs}
    assert step >= HELD - 1
    assert Path(runs[0].status()["checkpoint"]["path"]).is_dir()
    assert runs[0].status()["checkpoint"]["step"] == step
    return int(step)


def test_the_signal_requeues_with_one_joint_checkpoint(slurm: Cluster) -> None:
    """As Slurm sends it before the time limit, to all steps: code 75 of both hosts."""
    job, runs = _held(slurm)
    job.cancel("--signal=USR1")
    step = _stopped(slurm, runs, "SIGUSR1")
    _ended(slurm, job)
    assert "exit codes of node0 node1: 75 75\n" in job.printed()
    assert runs[0].events("train_started")[-1]["step"] == step


def test_a_preempted_job_keeps_every_step(slurm: Cluster) -> None:
    """Each host gets SIGTERM, and saves within KillWait; the job goes on with another host."""
    job, runs = _held(slurm)
    (slurm.folder / "short.sbatch").write_text("#!/bin/sh\nsleep 10\n")
    urgent = slurm.submit("--partition=urgent", "--nodelist=node1", "--exclusive", "short.sbatch")
    step = _stopped(slurm, runs, "SIGTERM")
    _ended(slurm, job)
    urgent.ended()
    assert runs[0].events("train_started")[-1]["step"] == step


def test_a_lost_host_is_replaced(slurm: Cluster) -> None:
    """Slurm notices after SlurmdTimeout, and requeues; another host has nothing of the lost one."""
    job, runs = _held(slurm)
    slurm.nodes[1].kill()
    runs[0].until_event("run_ended", exit_code=75, timeout_seconds=90)
    assert _ended(slurm, job)["NodeList"] == "node[0,2]"


def test_a_host_that_comes_back_at_once_is_used_again(slurm: Cluster) -> None:
    """Slurm notices nothing: the other host waits for it until its limit, ends with 75, and is requeued."""
    job, runs = _held(slurm)
    slurm.nodes[1].kill()
    time.sleep(5)
    slurm.nodes[1].boot()
    slurm.start_host(slurm.nodes[1])
    (slurm.folder / "hold").unlink()  # the next message to the host tells that its processes are gone
    runs[0].until_event("run_ended", exit_code=75, timeout_seconds=90)
    _ended(slurm, job)


def test_the_lost_host_of_the_endpoint_is_replaced(slurm: Cluster) -> None:
    """The batch script was there too: the others end with 75 by themselves, and Slurm requeues the job."""
    job, runs = _held(slurm)
    slurm.nodes[0].kill()
    runs[1].until_event("run_ended", exit_code=75, timeout_seconds=90)
    assert _ended(slurm, job)["NodeList"] == "node[1-2]"


def _until_committed(run: Run, step: int) -> None:
    """Wait for a step, in whichever job."""
    run.until(
        lambda events: [e for e in events if e["event"] == "step_committed" and e["step"] >= step], 120.0
    )


@pytest.mark.timeout(500)
def test_a_host_whose_record_is_old_takes_part(slurm: Cluster) -> None:
    """It was replaced for a while: what it has noted of the run ends at an earlier step than the others'."""
    hold, step = slurm.folder / "hold", 0
    hold.write_text("3")
    job = slurm.submit(*SIZE, FILE, *TRAIN)
    job.until_state("RUNNING")
    run = slurm.run(slurm.nodes[1])
    for restarts, excluded in ((1, "node0"), (2, "node2")):
        _until_committed(run, step + 2)
        job.cancel("--signal=USR1")
        run.until_event("stop_requested", count=restarts)
        hold.unlink()
        run.until_event("run_ended", count=restarts, exit_code=75)
        step = run.status()["step"]
        hold.write_text("3")
        job.until(lambda job, count=restarts: job.restarts == count)
        slurm.call("scontrol", "update", f"jobid={job.number}", f"excnodelist={excluded}")
    assert _ended(slurm, job, restarts=2)["NodeList"] == "node[0-1]"
    assert slurm.run(slurm.nodes[0]).events("train_started")[-1]["step"] == step


def test_the_refusal_of_one_host_is_not_requeued(slurm: Cluster) -> None:
    """Its 2 counts more than the 75 of the others, which are told not to wait for it."""
    script = '#!/bin/sh\n[ $(hostname) = node0 ] && exec python -m grpo_run "$@"\nsleep 25\nexit 2\n'
    (slurm.folder / "grpo-run").write_text(script)
    (slurm.folder / "grpo-run").chmod(0o755)
    path = f"{slurm.folder}:{slurm.environment['PATH']}"
    job = slurm.submit(*SIZE, FILE, *TRAIN, environment={"PATH": path})
    shown = job.ended("FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("2:0", "0")
    assert "exit codes of node0 node1: 75 2\n" in job.printed()


def test_a_failure_of_the_script_is_not_requeued(slurm: Cluster) -> None:
    """Both hosts end with 93, or the second one is told to stop."""
    shown = slurm.submit(*SIZE, FILE, *TRAIN, "--no-such-option").ended("FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("93:0", "0")
