"""Generation without an end, in five forms: it is named while it lasts and ended as a hang, and a stop does
not wait for it.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.references import undisturbed_command
from support.runs import SCRIPTS, Run, Runs, digest

SCRIPT = SCRIPTS / "endless_generation.py"
AT, STEPS = 8, 10
"""The endless step, after enough steps to learn from; and the last one."""
LIMITS = ("--deadline-first", "25", "--vote-timeout", "50", "--deadline-ceiling", "65")
"""Of what the run has not shown yet."""


def endless(runs: Runs, form: str, *options: str, attempts: int = 1, floor: float = 4.0) -> Run:
    """Start a run of two ranks whose generation has no end on rank 1."""
    return runs(
        "--nproc-per-node", "2", "--deadline-floor", str(floor), *options,
        str(SCRIPT), "--output-dir", "out", "--max-steps", str(STEPS), "--save-steps", "2",
        "--form", form, "--at", str(AT), "--attempts", str(attempts),
    ).start()  # fmt: skip


def told(run: Run) -> dict[str, Any]:
    """Wait until the run says that a generation has no end, and return the status of that time."""

    def said(events: list[dict[str, Any]]) -> list[str]:
        texts = [one["text"] for one in events if one["event"] == "warning"]
        return [text for text in texts if " and goes on, at " in text]

    (text, *_) = run.until(said, timeout_seconds=100)
    assert text.startswith("rank 1 has been in ")
    assert "at endless_generation.py:" in text
    run.until(lambda events: (run.status()["waiting"] or {}).get("place"))  # commands read it from the board
    return run.status()


def check_named(run: Run, status: dict[str, Any]) -> None:
    """The status says which rank generates, at which line, and which rank waits for it."""
    waiting, ranks = status["waiting"], status["ranks"]
    assert waiting is not None, run.tail()
    assert waiting["rank"] == 1
    assert waiting["place"].startswith("endless_generation.py:")
    assert [one["waits_for"] for one in ranks] == [1, None]


def check_ended(run: Run, cause: str) -> None:
    """It counts as a hang of rank 1, with its line, and the run goes on."""
    assert "grpo-run: rank 1 has been in " in run.printed()
    (incident,) = run.events("incident")
    assert (incident["cause"], incident["culprit"]) == (cause, 1), run.tail()
    assert "making progress without an end" in incident["sentence"]
    assert "endless_generation.py:" in incident["sentence"]
    (verdict,) = run.verdicts()
    assert verdict["waiters"] == [0]
    (recovery,) = run.status()["recoveries"]
    assert recovery["action"] == "restart"


@pytest.mark.timeout(200)
def test_a_generation_without_an_end_is_ended_and_a_stop_does_not_wait_for_it(runs: Runs) -> None:
    """Its tokens come all the time. The first is ended by its deadline, and the second by a stop."""
    run = endless(runs, "rollout", attempts=2)
    check_named(run, told(run))
    run.until_event("incident", timeout_seconds=100)
    check_ended(run, "generation_stall")
    run.until(lambda events: (run.cwd / "endless").read_text() == "..")
    run.send_signal(signal.SIGTERM)
    run.until_event("stop_requested")
    run.ended(75, timeout_seconds=60)
    *_, verdict = run.verdicts()
    assert (verdict["cause"], verdict["culprits"]) == ("stopped", [1])
    assert "rank 1 was in generate, at endless_generation.py:" in verdict["sentence"]
    assert run.status()["state"] == "stopped"


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("form", ["generate", "rollout", "streaming"])
def test_generation_of_a_trainer_recovers_to_the_same_weights(form: str, runs: Runs, tmp_path: Path) -> None:
    """By transformers' loop, by a `rollout_func`, and with tokens that come slowly."""
    run = endless(runs, form, floor=6.0)
    told(run)
    run.ended(timeout_seconds=300)
    check_ended(run, "generation_stall")
    command = [str(SCRIPT), "--form", form, "--max-steps", str(STEPS), "--at", "0"]
    assert digest(tmp_path / "out") == undisturbed_command(command, ranks=2)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_loop_of_all_ranks_blames_the_one_that_has_tokens_left(runs: Runs) -> None:
    """The other takes part in every turn of `while_any`."""
    run = endless(runs, "consensus")
    told(run)
    run.ended(timeout_seconds=300)
    check_ended(run, "generation_stall")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_body_of_a_step_that_never_ends(runs: Runs) -> None:
    """It is told of at once, and ended only after the time of an unknown phase: it may hold an evaluation."""
    run = endless(runs, "loop", *LIMITS)
    check_named(run, told(run))
    run.ended(timeout_seconds=300)
    check_ended(run, "no_progress")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["generate", "streaming", "consensus", "loop"])
def test_a_stop_ends_a_generation_without_an_end(form: str, runs: Runs) -> None:
    """In a few seconds, with the deadlines of every run."""
    run = endless(runs, form, floor=60.0)
    run.until(lambda events: (run.cwd / "endless").exists(), timeout_seconds=100)
    run.send_signal(signal.SIGTERM)
    run.until_event("stop_requested")
    run.ended(75, timeout_seconds=60)
    (verdict,) = run.verdicts()
    assert (verdict["cause"], verdict["culprits"]) == ("stopped", [1])


LONG_AND_HEALTHY = {
    "outliers": 2, "compilation": 1, "growth": 3, "evaluation": 4, "long-prompt": 1, "slow-tokens": 10,
}  # fmt: skip
"""By form: how many generations are longer than the floor of the deadlines, at least."""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", LONG_AND_HEALTHY)
def test_long_generations_of_a_healthy_run_are_neither_told_of_nor_ended(form: str, runs: Runs) -> None:
    """A first one that compiles, lengths that grow, an evaluation with 25 times as many tokens, a prompt that
    takes 20 times as long, tokens that come slowly, and one rank 20 times as long as ever; with deadlines of
    a fifteenth of the usual ones or less. The other rank waits meanwhile.
    """
    floor = 4.0
    evaluating = ("--eval-prompts", "8", "--settings", '{"eval_strategy": "steps", "eval_steps": 9}')
    run = runs(
        "--nproc-per-node", "2", "--deadline-floor", str(floor), *LIMITS, str(SCRIPT), "--output-dir", "out",
        "--max-steps", str(STEPS), "--save-steps", "2", "--form", form,
        *(evaluating if form == "evaluation" else ()),
    ).start().ended()  # fmt: skip
    took = [float(line) for line in (run.cwd / "generated.txt").read_text().splitlines()]
    assert sum(seconds > floor for seconds in took) >= LONG_AND_HEALTHY[form], took
    told = [event for event in run.events() if event["event"] in ("warning", "suspicion", "incident")]
    assert told == []
