"""Output of ranks is shown if they are; lines of the guard always."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.screen import Open

from grpo_run.dashboards.terminal.background_output import BackgroundStream


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_only_ranks_that_are_shown_are_printed(
    screen: Open, capsys: pytest.CaptureFixture[str], rank: int, shown: bool
) -> None:
    """Lines go to standard output and name the rank."""
    made = screen(shown=frozenset({0}))
    made.terminal.rank_line(rank, 1, "{'loss': 0.1}")
    made.terminal.stop()
    assert capsys.readouterr().out == ("[rank0] {'loss': 0.1}\n" if shown else "")
    assert made.lines() == []


def test_lines_of_the_guard_are_always_shown(screen: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """As an event of ours if the rank is not shown."""
    made = screen()
    made.terminal.rank_line(0, 1, "grpo-run: the disk is slow")
    made.terminal.stop()
    assert made.lines() == ["grpo-run: the disk is slow"]
    assert capsys.readouterr().out == ""


def test_a_traceback_is_printed_as_it_is(screen: Open) -> None:
    """Several lines, without a time."""
    made = screen()
    made.terminal.notify("Traceback:\n  File x\nValueError: no")
    made.terminal.stop()
    assert made.stderr.getvalue() == "Traceback:\n  File x\nValueError: no\n"


class Pipe(BackgroundStream):
    """A stream that output is passed on to."""

    def __init__(self) -> None:
        self.taken = b""

    @property
    def has_room(self) -> bool:
        return True

    def write_bytes(self, data: bytes) -> None:
        self.taken += data

    def write_file(self, path: Path, start: int) -> None:
        self.taken += path.read_bytes()[start:]


def test_in_a_pipe_the_bytes_of_shown_ranks_are_passed_on_without_lines_of_the_guard(
    screen: Open, tmp_path: Path
) -> None:
    """A line of the guard is an event, once for all ranks, and also of a rank that is not shown."""
    made, out, err = screen(shown=frozenset({0, 1})), Pipe(), Pipe()
    made.terminal._passed_on = {1: out, 2: err}
    made.terminal.rank_bytes(0, 1, b"\xff plain\r\n")
    made.terminal.rank_bytes(
        0, 2, b"Traceback (most recent call last):\ngrpo-run: the disk is slow\nKeyError: 1\n"
    )
    made.terminal.rank_bytes(1, 2, b"grpo-run: the disk is slow\n")
    made.terminal.rank_bytes(2, 2, b"grpo-run: of rank 2\nnot shown\n")
    rest = tmp_path / "rank0.log"
    rest.write_bytes(b"..the rest")
    made.terminal.rank_file(0, 1, rest, 2)
    made.terminal.rank_file(2, 1, rest, 2)
    assert (out.taken, err.taken) == (
        b"\xff plain\r\nthe rest",
        b"Traceback (most recent call last):\nKeyError: 1\n",
    )
    assert made.lines() == ["grpo-run: the disk is slow", "grpo-run: of rank 2"]


@pytest.mark.parametrize(("streams", "descriptor"), [((1,), 1), ((1, 2), 2)])
def test_an_event_begins_a_line_where_a_rank_has_begun_one(
    screen: Open, streams: tuple[int, ...], descriptor: int
) -> None:
    """A progress bar stays readable, in one pipe for both streams or in that of standard error."""
    made = screen(shown=frozenset({0}))
    made.terminal._passed_on = {stream: Pipe() for stream in streams}
    made.terminal.rank_bytes(0, descriptor, b"\r 7%")
    made.terminal.notify("one")
    made.terminal.notify("two")
    assert made.stderr.getvalue().startswith("\n")
    assert made.stderr.getvalue().count("\n") == 3


def test_a_reader_that_is_gone_ends_nothing(screen: Open) -> None:
    """The rank's file has what it prints."""
    made, pipe = screen(shown=frozenset({0})), Pipe()
    pipe.write_bytes = refuse  # type: ignore[method-assign]
    made.terminal._passed_on = {1: pipe}
    made.terminal.rank_bytes(0, 1, b"line\n")
    made.terminal.notify("continues")
    assert made.lines() == ["grpo-run: continues"]


def refuse(data: bytes) -> None:
    """Fail as a pipe without a reader does."""
    raise BrokenPipeError
