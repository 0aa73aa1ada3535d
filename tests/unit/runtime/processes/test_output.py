"""What ranks print, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.processes.output import MAX_LINE_BYTES, MAX_READ_BYTES, Follower, OutputFollower


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A rank's file, empty."""
    path = tmp_path / "rank0.log"
    path.touch()
    return path


def append(path: Path, content: bytes) -> None:
    """What the rank writes next."""
    with open(path, "ab") as file:
        file.write(content)


def test_whole_lines_come_once(log: Path) -> None:
    """And only what is new."""
    follower = Follower(log)
    append(log, b"one\ntwo\n")
    assert follower.read() == ["one", "two"]
    assert follower.read() == []


def test_part_of_a_line_waits_for_its_end(log: Path) -> None:
    """Ranks' lines must not be torn on the screen."""
    follower = Follower(log)
    append(log, b"step ")
    assert follower.read() == []
    append(log, b"7\n")
    assert follower.read() == ["step 7"]


def test_a_letter_in_two_parts_is_one_letter(log: Path) -> None:
    """Bytes are cut anywhere."""
    follower = Follower(log)
    append(log, "fü".encode()[:2])
    follower.read()
    append(log, "fü".encode()[2:] + b"nf\n")
    assert follower.read() == ["fünf"]


def test_of_a_progress_bar_the_last_state_is_shown(log: Path) -> None:
    """A carriage return overwrites what stood before; Windows' line ends are line ends."""
    follower = Follower(log)
    append(log, b"10%\r50%\r100%\nplain\r\n")
    assert follower.read() == ["100%", "plain"]


def test_the_rest_is_what_has_no_newline(log: Path) -> None:
    """Shown when the rank has ended; once."""
    follower = Follower(log)
    append(log, b"10%\r50%")
    assert follower.read() == []
    assert follower.rest() == ["50%"]
    assert follower.rest() == []


def test_a_progress_bar_cut_off_at_its_carriage_return_is_shown(log: Path) -> None:
    """Many bars end each state with one; the last state is not an empty line."""
    follower = Follower(log)
    append(log, b"10%\r50%\r")
    follower.read()
    assert follower.rest() == ["50%"]


def test_what_is_no_text_is_shown_as_far_as_it_goes(log: Path) -> None:
    """Never an error: the follower must not die of a rank's bytes."""
    follower = Follower(log)
    append(log, b"\xff\xfe ok\n")
    assert follower.read()[0].endswith(" ok")


def test_a_line_without_end_is_bounded(log: Path) -> None:
    """A rank that prints megabytes without a newline does not fill the supervisor's memory."""
    follower = Follower(log)
    for _ in range(8):
        append(log, b"x" * MAX_READ_BYTES)
        assert follower.read() == []
    append(log, b" the end\n")
    (line,) = follower.read()
    assert len(line) <= MAX_LINE_BYTES + len(" the end")
    assert line.endswith(" the end")


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    """The rank has not opened it yet."""
    follower = Follower(tmp_path / "rank0.log")
    assert follower.read() == []
    append(tmp_path / "rank0.log", b"now\n")
    assert follower.read() == ["now"]


@given(
    lines=st.lists(
        st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20), max_size=10
    ),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_however_a_text_arrives_its_lines_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int]
) -> None:
    """Cut at any byte."""
    log = tmp_path_factory.mktemp("output") / "rank0.log"
    log.touch()
    content = "".join(line + "\n" for line in lines).encode()
    follower, found, last = Follower(log), [], 0
    for cut in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        append(log, content[last:cut])
        last = cut
        found += follower.read()
    assert found == lines


@pytest.fixture
def shown() -> list[tuple[int, str]]:
    """What was printed, as (rank, line)."""
    return []


@pytest.fixture
def output(shown: list[tuple[int, str]]) -> OutputFollower:
    """A follower whose thread is not started: `drain` is called by hand."""
    return OutputFollower(lambda rank, line: shown.append((rank, line)))


def test_draining_shows_everything(
    tmp_path: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """Of every rank, also what has no newline."""
    for rank in (0, 1):
        append(tmp_path / f"rank{rank}.log", f"hello\nlast words of {rank}".encode())
    output.follow({rank: tmp_path / f"rank{rank}.log" for rank in (0, 1)})
    output.drain()
    assert shown == [(0, "hello"), (0, "last words of 0"), (1, "hello"), (1, "last words of 1")]
    output.drain()
    assert len(shown) == 4


def test_draining_does_not_stop_at_a_long_line(
    log: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """What follows a line longer than one read is the traceback one wants to see."""
    append(log, b"x" * (MAX_READ_BYTES + 1000) + b"\nKeyError: 'reward'\n")
    output.follow({0: log})
    output.drain()
    assert shown[-1] == (0, "KeyError: 'reward'")


def test_a_new_attempt_begins_after_the_old_ones_last_line(
    tmp_path: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """`follow` drains first."""
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    output.follow({0: old})
    append(old, b"from the old one\n")
    append(new, b"from the new one\n")
    output.follow({0: new})
    output.drain()
    assert shown == [(0, "from the old one"), (0, "from the new one")]


def test_stopping_shows_what_is_left(log: Path, output: OutputFollower, shown: list[tuple[int, str]]) -> None:
    """The thread may not have come round again."""
    output.start()
    output.follow({0: log})
    append(log, b"the very last line\n")
    output.stop()
    assert shown == [(0, "the very last line")]
