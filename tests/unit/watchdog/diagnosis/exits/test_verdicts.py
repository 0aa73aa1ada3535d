"""A verdict describes the failure in one sentence: where, in which call, and by which error or code."""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.diagnosis.exits import diagnose_early_exit, signal_name
from grpo_run.watchdog.json_values import to_json
from grpo_run.watchdog.observation import OpenPhase, Phase


def test_an_exit_without_an_exception_is_described_by_its_code() -> None:
    """`os._exit(3)` leaves only the exit code."""
    verdict = diagnose(make_exit(1, exit_code=3))
    assert verdict.culprit == 1
    assert verdict.location is None
    assert verdict.sentence == (
        "Rank 1 exited with code 3 in step 8 (phase generate) without finishing the script, by os._exit or in"
        " native code."
    )


@pytest.mark.parametrize(
    ("message", "said"), [("boom at the end", ": boom at the end"), ("3", "."), ("", "."), ("-1", ".")]
)
def test_the_text_of_sys_exit_is_said_and_a_mere_code_is_not(message: str, said: str) -> None:
    """`sys.exit("text")` prints the text and exits with 1."""
    verdict = diagnose(make_exit(1, exit_code=1, error=make_error(type="SystemExit", message=message)))
    assert verdict.sentence == (
        f"Rank 1 exited with code 1 in step 8 (phase generate) without finishing the script{said}"
    )


def test_the_verdict_has_the_location_of_the_exception() -> None:
    """File, line and function of the user's frame, and the traceback."""
    verdict = diagnose(make_exit(0, error=make_error()))
    assert verdict.location is not None
    assert to_json(verdict.location) == {"file": "/home/user/train.py", "line": 12, "function": "reward"}
    assert verdict.traceback == "Traceback (most recent call last): ..."


@pytest.mark.parametrize(
    ("message", "root", "said"),
    [
        ("bad value", "", "bad value"),
        ("bad value", "KeyError: 'lr'", "bad value; caused by KeyError: 'lr'"),
        ("", "KeyError: 'lr'", "caused by KeyError: 'lr'"),
        ("bad value\nand more", "", "bad value"),
        (
            (
                "Failed to import trl.x because of the following error (look up to see its traceback):\n\nNo"
                " module named 'y'"
            ),
            "ModuleNotFoundError: No module named 'y'",
            (
                "Failed to import trl.x because of the following error (look up to see its traceback): No"
                " module named 'y'"
            ),
        ),
        (
            "Error(s) in loading:\n\tsize mismatch for a:\n\tfor b",
            "",
            "Error(s) in loading: size mismatch for a:",
        ),
        ("ends with a colon:", "", "ends with a colon:"),
    ],
)
def test_the_sentence_keeps_what_the_first_line_announces_and_the_last_cause(
    message: str, root: str, said: str
) -> None:
    """The first line of transformers' errors of imports only says that there is another one."""
    verdict = diagnose(make_exit(0, error=make_error(message=message, root=root)))
    assert verdict.sentence.endswith(f": {said}")
    assert "\n" not in verdict.sentence


def test_an_empty_message_leaves_a_complete_sentence() -> None:
    """`raise ValueError` has no message."""
    sentence = diagnose(make_exit(0, error=make_error(type="AssertionError", message=""))).sentence
    assert sentence == "Rank 0 raised AssertionError in step 8 (phase generate)."


def test_the_step_is_the_highest_of_all_ranks() -> None:
    """The killed rank may be one step behind, or its slot unreadable."""
    exits = [make_exit(0, signal=signal.SIGKILL)]
    assert diagnose(*exits, slots={0: None, 1: make_slot(1, step=9)}, best_position=(1, 8)).step == 9


def test_signals_have_names_and_unknown_ones_numbers() -> None:
    """`SIGKILL`, not 9; an unknown signal is described by its number."""
    assert signal_name(9) == "SIGKILL"
    assert signal_name(45) == "signal 45"


def test_the_exit_code_of_a_script_is_reported_as_such() -> None:
    """`sys.exit(2)` is an exit with a code, not an exception."""
    ended = make_exit(0, order=0, exit_code=2, error=make_error(type="SystemExit", message="2"))
    verdict = diagnose(ended, best_position=(0, 0))
    assert "exited with code 2" in verdict.sentence
    assert "SystemExit" not in verdict.sentence


def test_an_exception_is_reported_where_it_was_raised() -> None:
    """It has left the phase by the time at which the slot is read."""
    error = make_error(phases=(Phase.data, Phase.score, Phase.reward))
    slots = {0: make_slot(0), 1: make_slot(1)}
    verdict = diagnose(make_exit(1, order=0, error=error), slots=slots)
    assert verdict.phase == "reward"
    assert verdict.sentence.startswith("Rank 1 raised ZeroDivisionError in step 8 (phase reward): ")


def test_an_exception_of_a_callback_names_it() -> None:
    """Inside the computation of a step it belongs to that step."""
    error = make_error(phases=(Phase.optimizer, Phase.callback), callback="Mine.on_step_end")
    assert "in step 8 (callback Mine.on_step_end)" in diagnose(make_exit(1, order=0, error=error)).sentence


def test_without_a_readable_slot_the_step_is_zero() -> None:
    """Verdicts of both kinds state a step, known or not."""
    failed = make_exit(0, error=make_error())
    assert diagnose(failed, slots={0: None}, best_position=(0, 0)).step == 0
    assert diagnose_early_exit([make_exit(1, exit_code=0)], [failed], {0: None, 1: None}).step == 0


def test_a_consensus_error_is_a_mismatch_whatever_made_its_name() -> None:
    """The type's name is read from a file, so it is compared by value."""
    assert diagnose(make_exit(0, error=make_error(type="ConsensusError"))).cause is Cause.collective_mismatch


def test_only_the_first_200_characters_of_a_message_are_quoted() -> None:
    """A message may hold a whole batch."""
    sentence = diagnose(make_exit(0, error=make_error(type="ValueError", message="x" * 500))).sentence
    assert sentence.count("x") == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM])
def test_only_a_kill_is_advised_to_look_for_the_out_of_memory_killer(number: signal.Signals) -> None:
    """It sends no other signal."""
    assert not diagnose(make_exit(0, signal=number)).advice


def test_a_callback_on_the_board_is_named_if_the_exception_says_nothing() -> None:
    """An exception that left its phases says by itself whether a callback raised it."""
    phases = (
        OpenPhase(phase=Phase.data, since_seconds=8.0),
        OpenPhase(phase=Phase.callback, since_seconds=9.0, callback="Mine.on_log"),
    )
    slots = {0: make_slot(0, phases=phases)}

    def sentence(**error: object) -> str:
        exits = [make_exit(0, error=make_error(**error))]
        return diagnose(*exits, slots=slots).sentence

    assert "after step 7 (callback Mine.on_log)" in sentence()
    assert "in step 8 (phase generate)" in sentence(phases=(Phase.data, Phase.generate))
    assert "(callback Its.on_save)" in sentence(phases=(Phase.callback,), callback="Its.on_save")


def test_a_verdict_says_where_the_failure_comes_from() -> None:
    """A script that refuses its arguments ends the run; the same exit in a step does not."""
    refused = make_exit(0, exit_code=2, error=make_error(type="SystemExit", message="2"))
    start = diagnose(refused, slots={0: make_slot(0, phases=())})
    assert (start.origin, start.final) == (Origin.usage, "the script refuses its arguments")
    step = diagnose(refused)
    assert (step.origin, step.final) == (Origin.code, "")
