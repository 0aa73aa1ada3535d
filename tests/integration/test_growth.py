"""What a script makes slower with every step is named; nothing is said of a script that stays as fast."""

from __future__ import annotations

import pytest
from support.runs import SCRIPTS, Runs

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader

STEPS = 1100
"""The first step, 30 that are compared with, and 480 or 960 that must rise."""


@pytest.mark.full
def test_the_part_that_gets_slower_is_named(runs: Runs) -> None:
    """In the journal, the status and the output, once; the run goes on to its end."""
    run = runs(
        "--nproc-per-node", "1", str(SCRIPTS / "slower.py"), "--output-dir", "out", "--cpu",
        "--max-steps", str(STEPS), "--save-steps", "100", "--logging-steps", "1",
        "--max-completion-length", "2",
    ).start().ended()  # fmt: skip
    found = {event["phase"]: event for event in run.events("growth_found")}
    assert len(found) == len(run.events("growth_found"))
    growth = found["reward"]
    assert growth["factor"] >= 2
    assert growth["sentence"] in run.printed()
    history = run_reader(RunDirectory(path=run.directory)).history()
    assert growth["sentence"] in [sentence for part in history.parts for sentence in part.pace()]
    assert run.status()["growth"].keys() == found.keys()
