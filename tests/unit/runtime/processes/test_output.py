"""Output of ranks, passed on line by line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.processes import output as output_module
from grpo_run.runtime.processes.output import (
    MAX_LINE_BYTES,
    MAX_READ_BYTES,
    TIMES,
    FileFollower,
    OutputFollower,
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """An empty output file."""
    path = tmp_path / "rank0.log"
    path.touch()
    return path


def append(path: Path, content: bytes) -> None:
    """Append what the rank writes next."""
    with open(path, "ab") as file:
        file.write(content)


@pytest.mark.parametrize(
    ("content", "lines", "last"),
    [
        (b"10%\r50%\r100%\nplain\r\n", ["100%", "plain"], []),
        (b"one\n10%\r50%", ["one"], ["50%"]),
        (b"10%\r50%\r", [], ["50%"]),
        (b"\xff ok\n", ["\ufffd ok"], []),
    ],
    ids=["progress bar and Windows", "without a newline", "bar that ends with a return", "invalid UTF-8"],
)
def test_lines_are_what_a_terminal_would_show(
    log: Path, content: bytes, lines: list[str], last: list[str]
) -> None:
    """The last one is shown once the rank has exited, and once."""
    follower = FileFollower(log, by_lines=True)
    append(log, content)
    assert follower.read_lines() == lines
    assert list(follower.read_all_lines()) == last
    assert list(follower.read_all_lines()) == []


def test_the_memory_for_a_line_is_bounded(log: Path) -> None:
    """A rank may print megabytes without a newline."""
    follower = FileFollower(log, by_lines=True)
    for _ in range(8):
        append(log, b"x" * MAX_READ_BYTES)
        assert follower.read_lines() == []
    append(log, b" the end\n")
    (line,) = follower.read_lines()
    assert len(line) <= MAX_LINE_BYTES + len(" the end")
    assert line.endswith(" the end")


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    """The rank has not created it yet."""
    follower = FileFollower(tmp_path / "rank0.log", by_lines=True)
    assert follower.read_lines() == []
    append(tmp_path / "rank0.log", b"now\n")
    assert follower.read_lines() == ["now"]


@given(
    lines=st.lists(
        st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20), max_size=10
    ),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_lines_do_not_depend_on_how_the_text_arrives(
    make_folder: Callable[[], Path], lines: list[str], cuts: list[int]
) -> None:
    """The text may be split at any byte."""
    log = make_folder() / "rank0.log"
    log.touch()
    content = "".join(line + "\n" for line in lines).encode()
    follower, found, last = FileFollower(log, by_lines=True), [], 0
    for cut in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        append(log, content[last:cut])
        last = cut
        found += follower.read_lines()
    assert found == lines


class Lines:
    """A printer of lines, as a terminal is; its other methods are not called."""

    def __init__(self, printer: Callable[[int, str], None]) -> None:
        self._printer = printer

    def rank_line(self, rank: int, descriptor: int, line: str) -> None:
        assert descriptor == 1
        self._printer(rank, line)

    def takes_bytes(self, descriptor: int) -> bool:
        return False

    def has_room(self, descriptor: int) -> bool:
        raise AssertionError

    def rank_bytes(self, rank: int, descriptor: int, data: bytes) -> None:
        raise AssertionError

    def rank_file(self, rank: int, descriptor: int, path: Path, start: int) -> None:
        raise AssertionError


def test_bytes_are_passed_on_by_whole_lines_and_states_of_a_progress_bar(log: Path) -> None:
    """Whatever they are; a state begins with its carriage return."""
    follower = FileFollower(log)
    append(log, b"one\ntw")
    assert follower.read() == b"one\n"
    append(log, b"o\xff\r\nthree")
    assert follower.read() == b"two\xff\r\n"
    append(log, b"\r 1%\r 2%")
    assert follower.read() == b"three\r 1%"
    append(log, b"\n")
    assert follower.read() == b"\r 2%\n"
    assert follower.take_rest() == (b"", log, log.stat().st_size)


def test_a_line_that_does_not_end_is_passed_on_after_a_while(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question, or the bar of a long step; and at once if it is long."""
    follower = FileFollower(log)
    append(log, b"Continue? ")
    assert follower.read() == b""
    monkeypatch.setattr(output_module, "BEGUN_SECONDS", 0.0)
    assert follower.read() == b"Continue? "
    assert follower.read() == b""
    append(log, b"x" * (MAX_READ_BYTES + 5))
    assert len(follower.read()) == MAX_READ_BYTES


@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([b"\n", b"\r", b"\r\n", b"text"]), max_size=30),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_nothing_is_lost_or_added_however_the_bytes_arrive(
    make_folder: Callable[[], Path], parts: list[bytes], cuts: list[int]
) -> None:
    """The bytes that are passed on are the file's."""
    log = make_folder() / "rank0.log"
    follower, found, last = FileFollower(log), b"", 0
    for cut in [*sorted(cuts), len(parts)]:
        append(log, b"".join(parts[last:cut]))
        last = max(last, cut)
        found += follower.read()
    found += follower.read()
    begun, path, position = follower.take_rest()
    assert found + begun + path.read_bytes()[position:] == log.read_bytes() == b"".join(parts)


class Reader(Lines):
    """A printer of bytes, as a pipe is, that takes nothing more once it is full."""

    def __init__(self, room: int) -> None:
        super().__init__(lambda rank, line: None)
        self.room = room
        self.taken: list[tuple[int, int, bytes]] = []
        self.files: list[tuple[int, int, bytes]] = []

    def takes_bytes(self, descriptor: int) -> bool:
        return True

    def has_room(self, descriptor: int) -> bool:
        return sum(len(data) for _, _, data in self.taken) < self.room

    def rank_bytes(self, rank: int, descriptor: int, data: bytes) -> None:
        self.taken.append((rank, descriptor, data))

    def rank_file(self, rank: int, descriptor: int, path: Path, start: int) -> None:
        self.files.append((rank, descriptor, path.read_bytes()[start:] if path.exists() else b""))


def test_what_a_slow_reader_has_not_taken_stays_in_the_file(log: Path) -> None:
    """It is not read into memory, and is passed on as a file when the attempt has ended."""
    content = b"".join(b"line %d\n" % number for number in range(100_000))
    append(log, content)
    reader = Reader(room=1)
    follower = OutputFollower(reader)
    follower.follow({(3, 2): log})
    follower.follow({})
    taken, rest = b"".join(data for _, _, data in reader.taken), reader.files[0][2]
    assert len(taken) <= MAX_READ_BYTES
    assert taken + rest == content
    assert {(rank, descriptor) for rank, descriptor, _ in reader.taken + reader.files} == {(3, 2)}


@pytest.fixture
def shown() -> list[tuple[int, str]]:
    """Printed lines, as (rank, line)."""
    return []


@pytest.fixture
def output(shown: list[tuple[int, str]]) -> OutputFollower:
    """A follower whose thread is not started; tests call `drain`."""
    return OutputFollower(Lines(lambda rank, line: shown.append((rank, line))))


def test_draining_prints_everything(
    tmp_path: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """The lines of every rank, including last lines without a newline."""
    for rank in (0, 1):
        append(tmp_path / f"rank{rank}.log", f"hello\nlast line of {rank}".encode())
    output.follow({(rank, 1): tmp_path / f"rank{rank}.log" for rank in (0, 1)})
    output.drain()
    assert shown == [(0, "hello"), (0, "last line of 0"), (1, "hello"), (1, "last line of 1")]
    output.drain()
    assert len(shown) == 4


def test_draining_continues_after_a_long_line(
    log: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """A traceback that follows a line longer than one read is printed."""
    append(log, b"x" * (MAX_READ_BYTES + 1000) + b"\nKeyError: 'reward'\n")
    output.follow({(0, 1): log})
    output.drain()
    assert shown[-1] == (0, "KeyError: 'reward'")


def test_output_of_a_new_attempt_follows_the_last_line_of_the_old_one(
    tmp_path: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """`follow` drains the old files first."""
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    output.follow({(0, 1): old})
    append(old, b"from the old one\n")
    append(new, b"from the new one\n")
    output.follow({(0, 1): new})
    output.drain()
    assert shown == [(0, "from the old one"), (0, "from the new one")]


def test_files_that_do_not_grow_are_looked_at_rarely(
    tmp_path: Path, output: OutputFollower, shown: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most ranks print nothing; a rank that prints is followed closely."""
    looks: Counter[str] = Counter()
    read = FileFollower.read_lines

    def counted(self: FileFollower) -> list[str]:
        looks[self.path.name] += 1
        return read(self)

    monkeypatch.setattr(FileFollower, "read_lines", counted)
    output.follow({(0, 1): tmp_path / "silent", (1, 1): tmp_path / "busy"})
    output.start()
    for _ in range(10):
        append(tmp_path / "busy", b"x\n")
        time.sleep(0.1)
    assert 1 <= looks["silent"] < looks["busy"]
    assert shown
    output.stop()
    assert shown == [(1, "x")] * 10


def test_stopping_prints_what_remains(
    log: Path, output: OutputFollower, shown: list[tuple[int, str]]
) -> None:
    """The thread may not have read the file since the last line was written."""
    output.start()
    output.follow({(0, 1): log})
    append(log, b"the very last line\n")
    output.stop()
    assert shown == [(0, "the very last line")]


def test_output_far_behind_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that prints 600 MB must not cost the supervisor as much: only the end is printed."""
    monkeypatch.setattr(output_module, "MAX_BEHIND_BYTES", 1000)
    path = tmp_path / "rank0.log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    printed: list[str] = []
    follower = OutputFollower(Lines(lambda rank, line: printed.append(line)))
    follower.follow({(0, 1): path})
    follower.drain()
    assert printed[0] == f"... 1 MB of output are in {path} only"
    assert printed[1:] == [f"line {number}" for number in range(100_000 - len(printed) + 1, 100_000)]
    assert len(printed) < 100


def test_a_follower_without_descriptors_reads_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and its thread does not end."""
    path = tmp_path / "rank0.log"
    path.write_text("first\n")
    follower = FileFollower(path, by_lines=True)
    with monkeypatch.context() as patched:

        def refuse(*arguments: object) -> None:
            raise OSError(24, "Too many open files")

        patched.setattr("builtins.open", refuse)
        assert follower.read_lines() == []
    assert follower.read_lines() == ["first"]


def test_it_is_noted_when_lines_were_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last whole line, only for files that have grown, and without harm where it cannot be."""
    monkeypatch.setattr(output_module, "TIMES_SECONDS", 0.0)
    monkeypatch.setattr(output_module, "QUIET_POLL_SECONDS", 0.02)
    folders = [tmp_path / name for name in ("000", "001")]
    for folder in folders:
        folder.mkdir()
        for rank in range(2):
            (folder / f"rank{rank}.log").touch()
    (folders[1] / TIMES).mkdir()  # cannot be written
    lines: list[str] = []
    output = OutputFollower(Lines(lambda rank, line: lines.append(line)))
    output.start()
    for folder in folders:
        output.follow({(rank, 1): folder / f"rank{rank}.log" for rank in range(2)})
        append(folder / "rank1.log", b"one\nbegun")
        deadline = time.monotonic() + 10
        while (folder == folders[0] and not (folder / TIMES).exists()) or "one" not in lines:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lines.clear()
    output.stop()
    assert lines == ["begun"]
    (noted,) = (folders[0] / TIMES).read_text().splitlines()
    at, *rest = noted.split()
    assert rest == ["1", "1", "4"]
    assert abs(float(at) - time.time()) < 60
