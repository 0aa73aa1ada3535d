"""The job of `docs/guide/eight-gpus.md`, section 5, under a real Slurm, with the page's own `srun` line.

Seven ranks on GPUs are one on a CPU, and `vllm` is the tests' stand-in with a tiny model, which a script of
the tests trains: neither the model nor the data of the page can be loaded without a network.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.rollout_server.starting import SCRIPT, command
from support.slurm import Cluster

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "eight-gpus.md"
STEPS, HELD = 8, 4


def _block(text: str, begins: str) -> str:
    """Return the only block of commands that begins so."""
    (found,) = (
        block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if block.startswith(begins)
    )
    return str(found)


def _batch_file() -> str:
    """The example, whose `srun` line is replaced by the page's, as the page says."""
    own = _block(PAGE.read_text(), "srun grpo-run launch")
    assert "--nproc-per-node 7 " in own
    example = (ROOT / "examples" / "slurm" / "one-node.sbatch").read_text()
    edited, count = re.subn(
        r"^srun .*?\$\{@:-train\.py\}\"\n", lambda _: own, example, flags=re.DOTALL | re.MULTILINE
    )
    assert count == 1
    return edited.replace("--nproc-per-node 7 ", "--nproc-per-node 1 ")


@pytest.mark.timeout(400)
def test_the_job_of_the_tutorial_is_requeued_and_finishes(slurm: Cluster) -> None:
    """The signal before the limit makes a checkpoint and a requeue, with a server in each job."""
    folder = slurm.folder
    python, program, model = command(folder, 0)[:3]
    words = shlex.join((python, program, model))
    stand_in = folder / "vllm"
    stand_in.write_text(f'#!/bin/sh\n[ "$1" = serve ] || exit 9\nshift 2\nexec {words} "$@"\n')
    stand_in.chmod(0o755)
    home = folder / "home"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "grpo-hook").write_text("http://127.0.0.1:9/\n")
    (folder / "one-node.sbatch").write_text(_batch_file())
    (folder / "hold").write_text(str(HELD))
    path = f"{folder}:{slurm.environment['PATH']}"
    job = slurm.submit(
        "--gpus-per-node=2", "one-node.sbatch", str(SCRIPT), "--output-dir", "out", "--max-steps", str(STEPS),
        "--save-steps", "4", "--cpu", environment={"PATH": path, "HOME": str(home)},
    )  # fmt: skip
    job.until_state("RUNNING")
    run = slurm.run()
    job.until(lambda _: any(one["step"] >= HELD - 1 for one in run.events("step_committed")), 150)
    job.cancel("--signal=USR1")  # as Slurm does before the time limit
    run.until_event("stop_requested", why="SIGUSR1")
    (folder / "hold").unlink()
    run.until_event("run_ended", exit_code=75)
    step = run.status()["checkpoint"]["step"]
    assert job.ended()["Restarts"] == "1"
    assert run.events("train_started")[-1]["step"] == step >= HELD - 1
    assert len(run.events("rollout_server_started")) == 2
    assert run.events("incident") == []
    assert run.status()["state"] == "finished"
    assert (folder / "out" / "weights.sha256").exists()
