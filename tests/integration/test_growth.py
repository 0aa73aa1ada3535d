"""What a script makes slower with every step is named; nothing is said of a script that stays as fast."""

from __future__ import annotations

import pytest
from support.runs import SCRIPTS, Run, Runs

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader

STEPS = 200
"""The first step, 30 that are compared with, 120 that must rise, and more on a busy machine."""
PARTS = {
    "hooks": ("", "hooks of the model, from "),
    "callback": ("Grows.on_step_end", "log history"),
    "reward": ("reward", "reward function searching"),
    "threads": ("reward", "threads, from "),
    "cache": ("reward", "reward function searching"),
    "dataset": ("data", ""),
}
"""By part: the phase or callback that is told, any if empty, and what grew with it."""


IN_EVERY_RUN = "reward"
"""The part that is tested always; the others belong to the campaigns, at 20 seconds each."""


@pytest.mark.parametrize(
    "part", [part if part == IN_EVERY_RUN else pytest.param(part, marks=pytest.mark.full) for part in PARTS]
)
def test_the_part_that_gets_slower_is_named(runs: Runs, part: str) -> None:
    """In the journal, the status and the output, once; the run goes on to its end."""
    run = _trained(runs, part)
    phase, text = PARTS[part]
    found = {event["phase"]: event for event in run.events("growth_found")}
    assert found
    assert len(found) == len(run.events("growth_found"))
    growth = found[phase] if phase else next(iter(found.values()))
    assert growth["factor"] >= 2
    assert 0 < growth["since_step"] < STEPS
    assert text in " ".join(growth["grew"])
    assert growth["sentence"] in run.printed()
    history = run_reader(RunDirectory(path=run.directory)).history()
    assert growth["sentence"] in [sentence for part in history.parts for sentence in part.pace()]
    assert run.status()["growth"].keys() == found.keys()


def test_nothing_is_said_of_a_script_that_stays_as_fast(runs: Runs) -> None:
    """In as many steps."""
    assert _trained(runs, "none").events("growth_found") == []


def _trained(runs: Runs, part: str) -> Run:
    run = runs(
        "--nproc-per-node", "1", str(SCRIPTS / "slower.py"), "--output-dir", "out", "--cpu",
        "--max-steps", str(STEPS), "--save-steps", "100", "--logging-steps", "1",
        "--max-completion-length", "2", "--part", part,
    )  # fmt: skip
    return run.start().ended()
