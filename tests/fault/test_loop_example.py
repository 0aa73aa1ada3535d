"""`examples/grpo_loop.py`, killed: the model and the numbers of an undisturbed run."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from support.loops import ON_CPU, kills
from support.references import plain_ranks
from support.runs import Runs

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "grpo_loop.py")


def model(folder: Path) -> str:
    """Return the digest of the model that a run has written."""
    return hashlib.sha256((folder / "grpo-loop" / "model.safetensors").read_bytes()).hexdigest()


def logged(text: str) -> set[tuple[int, str]]:
    """Return the steps and rewards that were logged. A step that is repeated must log the same."""
    return {(int(step), reward) for step, reward in re.findall(r"step (\d+): mean reward (\S+)", text)}


def test_the_example_with_sharded_state_resumes_from_memory(tmp_path: Path, runs: Runs) -> None:
    """Each rank of FSDP2 loads its own shards of the snapshot in memory."""
    words = ("--steps", "5", "--log-every", "1", "--fsdp2")
    (tmp_path / "plain").mkdir()
    plain_ranks(tmp_path / "plain", [EXAMPLE, *words], ranks=2)
    run = runs(*kills([4], 2), "--nproc-per-node", "2", EXAMPLE, *words, environment=ON_CPU).start().ended()
    assert len(run.events("fault_injected")) == 1, run.tail()
    assert any(event["in_memory"] for event in run.events("resume_chosen")), run.tail()
    assert logged(run.output.read_text()) == logged((tmp_path / "plain" / "printed.txt").read_text())
    assert model(tmp_path) == model(tmp_path / "plain"), run.tail()
