"""Lines in a pipe and on a terminal of 80 columns, each printed once; a closed terminal ends no run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.screen import TIME, Open, fault


def test_an_event_is_one_line_with_its_time(screen: Open) -> None:
    """Long events are not folded in a pipe."""
    made = screen()
    made.terminal.notify("word " * 40)
    made.terminal.stop()
    (line,) = made.stderr.getvalue().splitlines()
    assert TIME.match(line)
    assert TIME.sub("", line).startswith("grpo-run: word word")


def test_a_pipe_gets_no_control_codes(screen: Open) -> None:
    """The output of a fault has no escapes or carriage returns."""
    made = screen()
    made.history.recoveries.append(fault(seconds=1.0))
    made.terminal.stop()
    assert made.stderr.getvalue()
    assert "\x1b" not in made.stderr.getvalue()
    assert "\r" not in made.stderr.getvalue()


@pytest.mark.parametrize("said", [True, False])
def test_a_wrong_setting_is_said_once(screen: Open, said: bool) -> None:
    """The message is not repeated if the ranks have printed it, and there is no block."""
    made = screen()
    if said:
        for rank in (1, 0):
            made.terminal.rank_line(rank, 1, "grpo-run: --generation max_time: no such cap")
    made.history.recoveries.append(fault(action="stop"))
    made.end("--generation max_time: no such cap", wrong_usage=True)
    assert made.lines() == ["grpo-run: --generation max_time: no such cap"]


def test_a_terminal_gets_folded_lines_and_colour(screen: Open, tmp_path: Path) -> None:
    """Nothing is wider than 80 columns, and words stay whole."""
    made = screen(width=80)
    made.history.recoveries.append(fault(seconds=1.0, sentence="word " * 40, reason="because " * 20))
    made.terminal.stop()
    assert "\x1b[1;31mFAULT " in made.stderr.getvalue()
    assert "\x1b[1;32mRECOVERED " in made.stderr.getvalue()
    assert all(len(line) <= 80 for line in made.lines())
    assert all(set(line.split()) <= {"word"} for line in made.lines()[1:4])


def test_a_closed_terminal_does_not_end_the_run(screen: Open) -> None:
    """A hung-up terminal raises when it is written to."""
    made = screen()
    made.stderr.close()
    made.terminal.notify("x")
    made.terminal.stop()


def test_a_finding_of_the_memory_trace_is_printed_once(screen: Open) -> None:
    """Also one that was found just before the end; one of an earlier launch of the run is not printed
    again.
    """
    made = screen()
    record = {
        "event": "memory_finding", "time": 1.0, "rank": 1, "attempt": 0, "step": 8, "world_size": 2,
        "key": "a", "subject": "b",
        "sentence": "5 tensors",
    }  # fmt: skip
    made.history.apply(record)
    made.terminal._show_findings(made.status())
    made.history.apply({**record, "key": "c", "sentence": "6 tensors", "time": 1e12})
    made.end("Finished.")
    assert made.lines()[:2] == ["grpo-run: memory: rank 1: 5 tensors", "grpo-run: memory: rank 1: 6 tensors"]
    again = screen()
    again.terminal._finding_lines.skip(made.history.memory_trace)
    again.history = made.history
    again.end("Finished.")
    assert again.lines() == ["grpo-run: Finished."]
