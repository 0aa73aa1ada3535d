"""Generation caps and hygiene, set on the command line for an unmodified script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

STEPS = ("--max-steps", "8", "--save-steps", "4")


def test_caps_reach_generation_and_are_journaled(runs: Callable[..., Run], tmp_path: Path) -> None:
    """`--generation` limits completions, and the journal records the old and new values."""
    run = runs(
        "--nproc-per-node", "2", "--generation", "max_completion_length=3", "no_repeat_ngram_size=2",
        "repetition_penalty=1.1", "max_time=30", "repetition=64", str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "12",
        "--save-steps", "4",
    ).start()  # fmt: skip
    assert run.wait() == 0, run.tail()
    changed = {event["key"]: (event["old"], event["new"]) for event in run.events("generation_capped")}
    assert changed["max_completion_length"][1] == 3
    assert changed["max_completion_length"][0] > 3
    assert changed["no_repeat_ngram_size"] == (None, 2)
    assert changed["max_time"] == (None, 30.0)
    assert changed["repetition"] == (None, 64)
    lengths = [event["completion_length"] for event in run.events("step_logged")]
    assert lengths
    assert max(lengths) <= 3


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("rloo.py", marks=pytest.mark.full)])
def test_caps_that_are_never_hit_change_no_weight(
    script: str, runs: Callable[..., Run], tmp_path: Path
) -> None:
    """The run ends as under plain ranks without grpo-run; every rollout was watched."""
    run = runs(
        "--nproc-per-node", "2", "--generation", "repetition=8", "max_time=1000", str(SCRIPTS / script),
        "--output-dir", "out", "--max-steps", "12", "--save-steps", "4",
    ).start()  # fmt: skip
    assert run.wait() == 0, run.tail()
    assert run.events("completions_capped") == []
    assert digest(tmp_path / "out") == undisturbed(script, 12)


def test_hygiene_runs_at_its_interval_and_records_its_duration(runs: Callable[..., Run]) -> None:
    """`--hygiene-every 3` runs after steps 3 and 6 of 8, and the journal records each duration."""
    run = runs("--hygiene-every", "3", "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", "out", *STEPS).start()  # fmt: skip
    assert run.wait() == 0, run.tail()
    cleaned = run.events("hygiene")
    assert [event["step"] for event in cleaned] == [3, 6]
    assert all(0 < event["seconds"] < 5 for event in cleaned)
