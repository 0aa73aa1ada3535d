"""A fault is shown with its action and its recovery, once, and the last line says what to do next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders.screen import Open, fault


def test_a_fault_is_a_block_of_what_who_where_and_action(screen: Open, tmp_path: Path) -> None:
    """Facts that are not known are left out."""
    verdict = {"location": {"file": "/far/train.py", "line": 31, "function": "reward"}, "waiters": [0, 2]}
    (tmp_path / "verdict.json").write_text(json.dumps(verdict))
    made = screen()
    made.history.recoveries.append(fault(incident=str(tmp_path)))
    made.terminal.stop()
    assert made.lines() == [
        "grpo-run: FAULT Rank 1 was killed by SIGKILL in step 8 (phase reward).",
        "         detected  after 0.12 s",
        "         where     /far/train.py:31 in reward",
        "         waiting   ranks 0 and 2",
        "         action    restart all ranks: from the newest complete checkpoint",
        f"         evidence  {tmp_path}",
    ]


def test_a_recovery_is_shown_once_training_continues(screen: Open) -> None:
    """The line has the time and the cost, and appears once."""
    made = screen()
    made.history.recoveries.append(fault())
    made.terminal.notify("one")
    made.history.recoveries[0].recovery_seconds = 2.345
    made.history.recoveries[0].from_checkpoint, made.history.recoveries[0].lost_steps = 5, 2
    made.terminal.notify("two")
    made.terminal.stop()
    events = [line for line in made.lines() if line.startswith("grpo-run: ")]
    assert events == [
        "grpo-run: FAULT Rank 1 was killed by SIGKILL in step 8 (phase reward).",
        "grpo-run: one",
        (
            "grpo-run: RECOVERED training continues 2.35 s after the fault, resumed from step 5, 2 steps"
            " repeated"
        ),
        "grpo-run: two",
    ]


def test_faults_without_a_step_between_them_have_one_recovery(screen: Open) -> None:
    """Training continues once, after the last of them."""
    made = screen()
    made.history.recoveries += [fault(), fault()]
    made.terminal.notify("one")
    for recovery, seconds in zip(made.history.recoveries, (9.0, 2.0), strict=True):
        recovery.recovery_seconds = seconds
    made.terminal.stop()
    (line,) = [line for line in made.lines() if "RECOVERED" in line]
    assert line == "grpo-run: RECOVERED training continues 2.00 s after the last of 2 faults"


def test_a_fault_waits_for_its_action(screen: Open) -> None:
    """A block is printed once, complete."""
    made = screen()
    made.history.recoveries.append(fault(action=""))
    made.terminal.notify("collecting")
    assert made.lines() == ["grpo-run: collecting"]
    made.history.recoveries[0].action = "restart"
    made.terminal.stop()
    assert any("action    restart all ranks" in line for line in made.lines())


def test_faults_of_earlier_supervisors_are_not_shown_again(screen: Open) -> None:
    """They appear neither as a block nor as the latest incident."""
    made = screen(old=2)
    made.end("Finished.")
    assert made.lines() == ["grpo-run: Finished."]


def test_the_last_line_names_the_evidence_and_the_commands(screen: Open) -> None:
    """They belong to the latest fault."""
    made = screen(old=1)
    made.history.recoveries.append(fault(incident="/runs/night/incidents/0002-signal", seconds=1.0))
    made.end("Finished.")
    last = (
        "grpo-run: evidence in /runs/night/incidents/0002-signal; show it with"
        " `grpo-run report /runs/night --incident last` or `grpo-run status /runs/night`"
    )
    assert made.lines()[-2:] == ["grpo-run: Finished.", last]


@pytest.mark.parametrize("sentence", ["Rank 1 raised E in step 8.", "Rank 1 raised E in step 8"])
def test_the_fault_that_ends_the_run_is_shown_at_its_end(screen: Open, sentence: str) -> None:
    """Below the culprit's traceback; its sentence is not repeated, with or without a full stop."""
    made = screen()
    made.history.recoveries.append(fault(action="stop", reason="again", sentence=sentence))
    made.terminal.notify("Traceback\nE")
    made.end("Rank 1 raised E in step 8. Gave up: again.")
    assert made.lines() == [
        "Traceback",
        "E",
        f"grpo-run: FAULT {sentence}",
        "         detected  after 0.12 s",
        "         action    stop the run: again",
        "grpo-run: Gave up: again.",
        "grpo-run: see `grpo-run report /runs/night` or `grpo-run status /runs/night`",
    ]


def test_a_message_has_what_the_terminal_shows_of_faults_and_the_end(screen: Open) -> None:
    """Each once, without other events: the sentence and the action, the recovery, and how the run ended."""
    made = screen(old=1)
    made.terminal.notify("one")
    made.history.recoveries.append(fault())
    made.terminal.notify("two")
    made.history.recoveries[-1].recovery_seconds = 2.345
    made.terminal.notify("three")
    made.history.recoveries.append(fault(action="stop", reason="again"))
    made.end("Rank 1 was killed by SIGKILL in step 8 (phase reward). Gave up: again.")
    killed = "FAULT Rank 1 was killed by SIGKILL in step 8 (phase reward).\naction    "
    assert made.told == [
        f"{killed}restart all ranks: from the newest complete checkpoint",
        "RECOVERED training continues 2.35 s after the fault",
        f"{killed}stop the run: again",
        "Gave up: again.",
    ]


def test_a_setting_that_ends_the_run_is_told_although_the_guard_has_printed_it(screen: Open) -> None:
    """It is all there is to say."""
    made = screen()
    made.terminal.rank_line(0, 2, "grpo-run: the optimizer is not supported")
    made.end("the optimizer is not supported", wrong_usage=True)
    assert made.lines() == ["grpo-run: the optimizer is not supported"]
    assert made.told == ["the optimizer is not supported"]
