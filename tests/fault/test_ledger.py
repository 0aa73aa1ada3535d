"""Whatever is killed when: the ledger counts every prompt as often as in an undisturbed run, and says which
were done again.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from support.runs import SCRIPTS, Run, Runs

COUNTED = ("trained", "trained_again")
RANKS = 2
KILLS = 10
STEP_SECONDS = 0.2
CASES = {
    "one epoch": ("--max-steps", "24"),
    "two epochs": ("--max-steps", "24", "--prompts", "24"),
    "several steps of a rollout": (
        "--max-steps", "24", "--steps-per-generation", "2", "--num-iterations", "2", "--prompts", "16",
    ),
    "accumulated": (
        "--max-steps", "24", "--steps-per-generation", "4", "--gradient-accumulation-steps", "2",
    ),
    "stream": ("--max-steps", "24", "--stream", "--prompts", "24"),
}  # fmt: skip


def command(*words: str) -> list[str]:
    """The words of a launch."""
    return [
        "--nproc-per-node", str(RANKS), "--max-restarts", "40", "--snapshot-every", "2",
        str(SCRIPTS / "grpo.py"), "--save-steps", "8", "--save-inside-rollouts", *words,
    ]  # fmt: skip


def ledger(run: Run) -> list[dict[str, Any]]:
    """Return the lines that `grpo-run ledger` exports."""
    file = run.folder / f"{run.directory.name}.jsonl"
    run.command("ledger", "--output", str(file))
    return [json.loads(line) for line in file.read_text().splitlines()]


def counted(run: Run) -> list[tuple[Any, ...]]:
    """Return place, prompt and lengths of all that was trained. Nothing else may have become of a prompt."""
    lines = ledger(run)
    assert {one["state"] for one in lines} <= {*COUNTED, "open"}, lines
    return [
        (one["train_call"], one["epoch"], one["position"], one["prompt"], one["lengths"])
        for one in lines
        if one["state"] in COUNTED
    ]


def undisturbed(runs: Runs, *words: str) -> list[tuple[Any, ...]]:
    """Return what an undisturbed run counts."""
    plain = runs(*command(*words, "--output-dir", "plain-out"), name="plain").start().ended()
    assert {one["state"] for one in ledger(plain)} <= {"trained", "open"}
    return counted(plain)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_every_prompt_counts_as_often_as_in_an_undisturbed_run(runs: Runs, case: str) -> None:
    """Ranks are killed at ten random places of steps, saves and starts."""
    expected = undisturbed(runs, *CASES[case])
    chance = random.Random(case)
    run = runs(*command(*CASES[case], "--step-seconds", str(STEP_SECONDS), "--output-dir", "out")).start()
    for kill in range(KILLS):
        run.until_event("attempt_started", count=kill + 1)
        run.until_event("train_started", attempt=kill, count=RANKS)
        time.sleep(chance.uniform(0.0, 3 * STEP_SECONDS))  # random, not guessed: any place will do
        run.kill(chance.randrange(RANKS))
        run.until_event("incident", count=kill + 1)
    run.ended(timeout_seconds=500)
    assert counted(run) == expected
    if any(one["step"] > 1 for one in run.events("incident")):
        assert any(one["state"] == "trained_again" for one in ledger(run))


def test_a_step_that_is_done_again_counts_once(runs: Runs) -> None:
    """The report has its completions beside those that count."""
    run = runs(*command("--max-steps", "6", "--output-dir", "out"))
    with run.held(after=5):
        run.start().until_step(5)  # the newest snapshot is of step 4
        run.kill(1)
        run.until_event("incident")
    run.ended()
    lines = ledger(run)
    assert [one["state"] for one in lines].count("trained_again") >= 2
    assert {one["state"] for one in lines} <= set(COUNTED)
    again = [one for one in lines if one["state"] == "trained_again"]
    assert all(one["attempt"] == 1 for one in again), again
    assert all(one["repeated"] in ([], one["lengths"]) for one in lines), lines
    report = run.command("report", "--format", "md")
    assert f"{len(lines) - len(again)} trained once" in report
    assert "0 lost." in report
    assert "completions repeated" in report
    size = sum(file.stat().st_size for file in (run.directory / "ledger").iterdir())
    assert size / len(lines) < 100, size
