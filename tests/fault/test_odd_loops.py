"""Hand-written loops that are odd but legitimate, killed twice, end like an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.loops import ON_CPU, kills
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

SCRIPT = str(SCRIPTS / "odd_loops.py")
KINDS = [
    name
    for file in sorted((SCRIPTS / "odd_loop_kinds").glob("*.py"))
    for name in re.findall(r"^def (\w+)\(t: Training\)", file.read_text(), re.MULTILINE)
]
WITH_DDP = ("accumulated", "agreed", "committed", "averaged")


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 1) for kind in KINDS), *((kind, 2) for kind in WITH_DDP)]
)
def test_an_odd_loop_that_is_killed_equals_the_undisturbed_one(
    kind: str, ranks: int, runs: Runs, tmp_path: Path
) -> None:
    """Weights, what was logged, and the next random numbers."""
    words = (SCRIPT, "--kind", kind, "--output-dir")
    plain_ranks(tmp_path, [*words, "plain"], ranks=ranks)
    options = ("--nproc-per-node", str(ranks), *kills((3, 4), ranks))
    run = runs(*options, *words, "out", environment=ON_CPU).start().ended()
    assert len(run.events("fault_injected")) == 2, run.tail()
    for rank in range(ranks):
        name = f"end{rank}.txt"
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "plain" / name).read_text(), run.tail()
    assert digest(tmp_path / "out") == digest(tmp_path / "plain"), run.tail()


IN_A_THREAD = """
import threading, torch
from grpo_run.trainers import loop

def main():
    model = torch.nn.Linear(2, 2)
    for step in loop.steps(4, state={"model": model}, output_dir="out"):
        pass

thread = threading.Thread(target=main, name="training")
thread.start()
thread.join()
"""


@pytest.mark.full
def test_a_loop_in_another_thread_is_refused(runs: Runs, tmp_path: Path) -> None:
    """A stop or an exception would end the thread only, and the run would count as finished."""
    (tmp_path / "train.py").write_text(IN_A_THREAD)
    run = runs("train.py").start().ended(2)
    assert "a loop begins in thread 'training': loops work in the main thread only" in run.printed()
