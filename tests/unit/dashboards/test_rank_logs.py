"""What ranks have printed, read line by line over the attempts of a run."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.dashboards.rank_logs import LogLine, RankLogs, harmless, start_of_last
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.output import MAX_LINE_BYTES, TIMES

MEGABYTE = 1 << 20


class Ranks:
    """Ranks that print into the files of their attempts."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(path=folder)

    def file(self, attempt: int, rank: int, ending: str = "log") -> Path:
        """The file of a rank."""
        path = self.run.attempt(attempt) / f"rank{rank}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def say(self, attempt: int, rank: int, text: str | bytes, ending: str = "log") -> None:
        """A rank prints."""
        with open(self.file(attempt, rank, ending), "ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Of a run that has printed nothing."""
    return Ranks(tmp_path / "run")


def texts(lines: Iterable[LogLine]) -> list[str]:
    """Where each line is from, and the line."""
    return [f"{line.attempt}.{line.rank} {line.text}" for line in lines]


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPqqq\x1b\\drawn", "drawn"),
        ("\x1b[2J\x1b[1;1Hcleared\x1bc", "cleared"),
        ("a\0\0\0b", "ab"),
        ("bell\x07 back\x08", "bell␇ back␈"),
        ("\x9b31m one byte", "\ufffd31m one byte"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("\x1b]0;never ended", ""),
    ],
)
def test_what_a_terminal_obeys_is_not_in_a_line(printed: str, shown: str) -> None:
    """Whole sequences are left out; single control characters are pictures."""
    assert harmless(printed) == shown


@given(st.text())
def test_no_text_has_control_characters(text: str) -> None:
    """Whatever a script prints."""
    assert not set(harmless(text)) & {chr(code) for code in (*range(32), 127) if chr(code) not in "\t\n"}


def test_lines_go_on_over_a_kill_and_a_new_attempt(ranks: Ranks) -> None:
    """A line that was begun when its rank was killed comes before the lines of the next attempt, once."""
    logs = RankLogs(ranks.run)
    assert texts(logs.new()) == []
    ranks.say(0, 0, "one\ntwo\n")
    ranks.say(0, 1, "from 1\n")
    assert texts(logs.new()) == ["0.0 one", "0.0 two", "0.1 from 1"]
    ranks.say(0, 1, "killed in the mid")
    assert texts(logs.new()) == []
    ranks.say(0, 0, "last of 0\n")
    ranks.say(1, 1, "again\nunfinished")
    assert texts(logs.new()) == ["0.0 last of 0", "0.1 killed in the mid", "1.1 again"]
    assert texts(logs.new()) == []
    assert texts(logs.rest()) == ["1.1 unfinished"]
    assert texts(logs.rest()) == []
    assert logs.attempts() == [0, 1]
    assert logs.ranks(0) == [0, 1]


def test_ranks_and_attempts_are_chosen(ranks: Ranks) -> None:
    """Standard error in a file of its own belongs to its rank."""
    for attempt in range(2):
        for rank in range(3):
            ranks.say(attempt, rank, "out\n")
            ranks.say(attempt, rank, "err\n", "err")
    assert texts(RankLogs(ranks.run, ranks={1}).new()) == ["0.1 out", "0.1 err", "1.1 out", "1.1 err"]
    found = list(RankLogs(ranks.run, ranks={0, 2}, attempt=1).new())
    assert [(one.attempt, one.rank, one.descriptor) for one in found] == [
        (1, 0, 1), (1, 0, 2), (1, 2, 1), (1, 2, 2),
    ]  # fmt: skip


def test_a_caller_that_stops_gets_the_rest_later(ranks: Ranks) -> None:
    """No line is lost or given twice, in whatever portions they are taken."""
    ranks.say(0, 0, "".join(f"{number}\n" for number in range(100)))
    ranks.say(0, 1, "after\n")
    logs, taken = RankLogs(ranks.run), []
    for _ in range(15):
        taken += texts(islice(logs.new(), 7))
    assert taken == [*(f"0.0 {number}" for number in range(100)), "0.1 after"]


def test_readers_do_not_know_of_one_another(ranks: Ranks) -> None:
    """Five, at different paces, over a new attempt: each gets every line once and in order."""
    readers = [RankLogs(ranks.run) for _ in range(5)]
    taken: list[list[str]] = [[] for _ in readers]
    for number in range(60):
        attempt = number // 30
        ranks.say(attempt, 0, f"line {number}\n")
        for pace, (reader, lines) in enumerate(zip(readers, taken, strict=True), 1):
            if number % pace == 0:
                lines += texts(islice(reader.new(), pace))
    for reader, lines in zip(readers, taken, strict=True):
        lines += texts(reader.rest())
        assert lines == [f"{number // 30}.0 line {number}" for number in range(60)]


@pytest.mark.parametrize("replaced", [False, True], ids=["truncated", "replaced"])
def test_a_file_that_is_rotated_is_read_from_its_beginning(ranks: Ranks, replaced: bool) -> None:
    """As by logrotate, with and without `copytruncate`."""
    ranks.say(0, 0, "a long line before\nbegun")
    logs = RankLogs(ranks.run)
    assert texts(logs.new()) == ["0.0 a long line before"]
    path = ranks.file(0, 0)
    if replaced:
        path.rename(path.with_suffix(".1"))
        path.write_text("after, and even longer than what was there\n")
    else:
        path.write_text("after\n")
    assert texts(logs.new()) == [f"0.0 {path.read_text().strip()}"]


@pytest.mark.parametrize("content", [b"\0" * (3 * MEGABYTE), b"x" * (3 * MEGABYTE), b"50%|\r" * MEGABYTE])
def test_a_line_of_megabytes_is_bounded(ranks: Ranks, content: bytes) -> None:
    """Null bytes of a hole, text without an end, the states of a progress bar."""
    ranks.say(0, 0, content + b"\nnext\n")
    first, second = RankLogs(ranks.run).new()
    assert len(first.text) < MAX_LINE_BYTES + 100
    assert second.text == "next"


def test_the_last_lines_of_a_large_file_are_there_at_once(ranks: Ranks) -> None:
    """Of 100 MB, the end is read and nothing else; what follows is complete."""
    path = ranks.file(0, 0)
    path.touch()
    os.truncate(path, 100 * MEGABYTE)
    ranks.say(0, 0, "\n" + "".join(f"{number}\n" for number in range(5000)))
    began = time.monotonic()
    logs = RankLogs(ranks.run, lines=3)
    assert texts(logs.new()) == ["0.0 4997", "0.0 4998", "0.0 4999"]
    assert time.monotonic() - began < 1.0
    ranks.say(0, 0, "5000\n")
    ranks.say(1, 0, "1\n2\n3\n4\n")
    assert texts(logs.new()) == ["0.0 5000", "1.0 1", "1.0 2", "1.0 3", "1.0 4"]


@given(
    lines=st.lists(st.sampled_from(["", "a", "long" * 30]), max_size=8), count=st.integers(0, 10),
    ends=st.booleans(),
)  # fmt: skip
def test_the_last_lines_are_those_of_tail(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], count: int, ends: bool
) -> None:
    """Whether or not the last one has an end."""
    path = tmp_path_factory.getbasetemp() / f"{os.getpid()}.log"
    text = "\n".join(lines) + "\n" * ends
    path.write_text(text)
    whole = text.splitlines(keepends=True)
    assert text[start_of_last(path, count) :] == "".join(whole[len(whole) - min(count, len(whole)) :])


def test_what_was_printed_since_a_time_is_shown(ranks: Ranks) -> None:
    """Attempts that ended before are left out; of the others, what was there at the last note before it."""
    now = time.time()
    ranks.say(0, 0, "long ago\n")
    os.utime(ranks.file(0, 0), (now - 900, now - 900))
    ranks.say(1, 0, "old\n")
    ranks.say(1, 1, "of 1\n")
    notes = ranks.run.attempt(1) / TIMES
    notes.write_text(f"{now - 600:.0f} 0 1 4\n{now - 600:.0f} 1 1 0\n{now - 60:.0f} 0 1 8\ntorn 0")
    ranks.say(1, 0, "mid\nnew\n")
    assert texts(RankLogs(ranks.run, since=now - 300).new()) == ["1.0 mid", "1.0 new", "1.1 of 1"]
    assert texts(RankLogs(ranks.run, since=now - 30).new()) == ["1.0 new", "1.1 of 1"]
    assert texts(RankLogs(ranks.run, since=now - 300, lines=1).new()) == ["1.0 new", "1.1 of 1"]
    assert texts(RankLogs(ranks.run, since=now + 9).new()) == []


@pytest.mark.full
def test_100_megabytes_are_read_in_bounded_memory(ranks: Ranks) -> None:
    """All of them, in order, in a few megabytes."""
    block = b"".join(
        b"%07d some text that a script prints in every step of its training\n" % n for n in range(10_000)
    )
    count = 100 * MEGABYTE // len(block) + 1
    for _ in range(count):
        ranks.say(0, 0, block)
    tracemalloc.start()
    try:
        found = 0
        for line in RankLogs(ranks.run).new():
            assert int(line.text[:7]) == found % 10_000
            found += 1
        assert found == count * 10_000
        assert tracemalloc.get_traced_memory()[1] < 8 * MEGABYTE
    finally:
        tracemalloc.stop()
