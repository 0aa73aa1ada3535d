"""A prompt that cannot be generated from, or scored, costs some recoveries, not the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import SCRIPTS, Run, Runs, digest

SCRIPT = str(SCRIPTS / "bad_prompt.py")
STEPS = ("--max-steps", "6", "--save-steps", "2", "--bad-prompt", "5")
"""Rank 1 generates from prompt 5 in step 4."""


FIRST = 9
"""A prompt of step 1."""
QUICK = ("--deadline-floor", "3", "--deadline-first", "5")
"""Deadlines of a test."""


def bad_prompt(
    runs: Runs, *words: str, options: tuple[str, ...] = (), name: str = "run", output_dir: str = "out"
) -> Run:
    """A run that fails in step 4 as the script's arguments say, in generation by default.

    Args:
        words: arguments of the script.
        options: of `grpo-run launch`.
    """
    return runs(
        "--nproc-per-node", "2", *options, SCRIPT, "--output-dir", output_dir, *STEPS, *words, name=name
    ).start()  # fmt: skip


def test_a_prompt_on_which_generation_fails_twice_is_replaced(runs: Runs, tmp_path: Path) -> None:
    """It leaves baseline and loss, is listed for the user, and stays out after another fault."""
    run = bad_prompt(runs, options=("--inject", "kill@rank0:step6"))
    run.ended()
    actions = [event["action"] for event in run.events("action")]
    assert actions == ["restart", "quarantine_batch", "restart"], run.tail()
    (event,) = run.events("prompt_quarantined")
    listed = json.loads((run.directory / "quarantine.json").read_text())
    assert event["prompts"] == listed
    assert [(one["preview"], one["from_step"]) for one in listed] == [("pxesgx", 4)]
    (excluded,) = run.events("sample_masked")
    assert (excluded["rank"], excluded["step"], excluded["reason"]) == (1, 4, "quarantined")
    assert "1 prompt is replaced from step 4 on" in run.printed()


@pytest.mark.full
def test_a_fault_after_the_quarantine_ends_in_the_same_weights(runs: Runs, tmp_path: Path) -> None:
    """Steps before the recorded one keep the prompt, later ones replace it, whatever is done again."""
    undisturbed = bad_prompt(runs, name="undisturbed")
    undisturbed.ended()
    expected = digest(tmp_path / "out")
    killed = bad_prompt(
        runs, options=("--inject", "kill@rank0:step6", "--inject", "kill@rank1:step5"), name="killed",
        output_dir="out2",
    )  # fmt: skip
    killed.ended()
    assert digest(tmp_path / "out2") == expected


@pytest.mark.full
def test_a_prompt_that_a_reward_in_the_rank_raises_on_is_replaced(runs: Runs) -> None:
    """The function has a state, so it cannot run in a worker: it is asked for once more before its prompts
    leave.
    """
    run = bad_prompt(runs, "--where", "reward", "--stateful")
    run.ended()
    actions = [event["action"] for event in run.events("action")]
    assert actions == ["restart", "restart", "quarantine_batch"], run.tail()
    (moved,) = run.events("reward_moved")
    assert moved["function"] == "reward"
    assert "reward function reward has raised 2 times at one step" in run.printed()
    (excluded,) = run.events("sample_masked")
    assert (excluded["rank"], excluded["step"], excluded["reason"]) == (1, 4, "quarantined")
    assert "1 prompt is replaced from step 4 on, because rewards failed twice" in run.printed()


@pytest.mark.full
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_prompt_that_a_reward_fails_on_costs_its_samples_where_a_worker_can_run_it(
    runs: Runs, how: str
) -> None:
    run = bad_prompt(runs, "--where", "reward", "--how", how, options=("--reward-timeout", "1", *QUICK))
    run.ended()
    assert [event["action"] for event in run.events("action")] == ["restart", "restart"], run.tail()
    assert run.events("prompt_quarantined") == []
    (excluded,) = run.events("sample_masked")
    assert (excluded["rank"], excluded["step"], len(excluded["samples"])) == (1, 4, 4)


@pytest.mark.full
def test_a_reward_that_has_never_returned_ends_the_run_after_one_more_try(runs: Runs) -> None:
    """It is taken to be broken: it is neither moved, nor are its prompts replaced."""
    run = bad_prompt(runs, "--where", "reward", "--bad-prompt", str(FIRST))
    run.ended(93)
    assert [event["action"] for event in run.events("action")] == ["restart", "stop"], run.tail()
