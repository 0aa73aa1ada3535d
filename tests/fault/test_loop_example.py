"""`examples/grpo_loop.py`, killed at every step of two epochs: the model and the numbers of torchrun's
undisturbed run.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from support.loops import ON_CPU, kills
from support.references import plain_ranks, torchrun
from support.runs import Run, Runs

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "grpo_loop.py")
EPOCH = {1: 8, 2: 4, 3: 3}
"""Steps of an epoch by number of ranks: 32 prompts, at most 4 for each rank and step."""


def model(folder: Path) -> str:
    """Return the digest of the model that a run has written."""
    return hashlib.sha256((folder / "grpo-loop" / "model.safetensors").read_bytes()).hexdigest()


def logged(text: str) -> set[tuple[int, str]]:
    """Return the steps and rewards that were logged. A step that is repeated must log the same."""
    return {(int(step), reward) for step, reward in re.findall(r"step (\d+): mean reward (\S+)", text)}


def killed(
    runs: Runs,
    ranks: int,
    words: tuple[str, ...],
    steps: range,
    phases: tuple[str, ...] = (),
    *,
    timeout_seconds: float,
) -> Run:
    """Run the example under `grpo-run launch`, with a rank killed in each of these steps, to its end."""
    options = (*kills(steps, ranks, phases), "--nproc-per-node", str(ranks))
    if phases:
        options = (*options, "--snapshot-every", "1")
    run = runs(*options, EXAMPLE, *words, environment=ON_CPU).start().ended(timeout_seconds=timeout_seconds)
    assert len(run.events("fault_injected")) == len(steps), run.tail()
    assert any(event["in_memory"] for event in run.events("resume_chosen")), run.tail()
    return run


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phases", [(), ("vote", "optimizer", "checkpoint", "data")], ids=["body", "phases"])
@pytest.mark.parametrize(
    ("ranks", "mode"), [(1, ()), (2, ()), (3, ()), (2, ("--fsdp2",))],
    ids=["one rank", "DDP of 2", "DDP of 3", "FSDP2 of 2"],
)  # fmt: skip
def test_the_example_killed_at_every_step_equals_torchruns_undisturbed_run(
    ranks: int, mode: tuple[str, ...], phases: tuple[str, ...], tmp_path: Path, runs: Runs
) -> None:
    """Two epochs; DDP with one rank is the plain model. The model is compared by its bytes, the rewards at
    every step.
    """
    steps = 2 * EPOCH[ranks]
    words = ("--steps", str(steps), "--log-every", "1", *mode)
    (tmp_path / "torchrun").mkdir()
    command = ["--standalone", "--nproc-per-node", str(ranks), EXAMPLE, *words]
    expected = logged(torchrun(tmp_path / "torchrun", command, environment=ON_CPU))
    assert len(expected) == steps
    run = killed(runs, ranks, words, range(1, steps + 1), phases, timeout_seconds=600)
    assert logged(run.output.read_text()) == expected, run.tail()
    assert model(tmp_path) == model(tmp_path / "torchrun"), run.tail()


def test_the_example_with_sharded_state_resumes_from_memory(tmp_path: Path, runs: Runs) -> None:
    """Each rank of FSDP2 loads its own shards of the snapshot in memory."""
    words = ("--steps", "5", "--log-every", "1", "--fsdp2")
    (tmp_path / "plain").mkdir()
    plain_ranks(tmp_path / "plain", [EXAMPLE, *words], ranks=2)
    run = killed(runs, 2, words, range(4, 5), timeout_seconds=120)
    assert logged(run.output.read_text()) == logged((tmp_path / "plain" / "printed.txt").read_text())
    assert model(tmp_path) == model(tmp_path / "plain"), run.tail()
