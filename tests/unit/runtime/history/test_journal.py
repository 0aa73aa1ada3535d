"""The journal: complete, bounded lines in order."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.journal import event, read_records

from grpo_run.runtime.event import Event, event_name
from grpo_run.runtime.history import journal as journal_module
from grpo_run.runtime.history.events import WarningGiven
from grpo_run.runtime.history.history import DECODER
from grpo_run.runtime.history.journal import MAX_LINE_BYTES, Journal, JournalReader

Events = Callable[[], list[dict[str, Any]]]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


class Anything(Event, kw_only=True):
    """An event with a value of any type."""

    value: Any


def test_every_line_has_the_common_keys(journal: Journal, tmp_path: Path, events: Events) -> None:
    """The seven keys that every line has, then the fields of the event. Only the owner can read them."""
    journal.write(event("step_logged", rank=1, step=7, reward=0.5))
    assert events() == [
        {
            "time": 1000.0, "monotonic": 10.0, "run": "run-1", "attempt": 0, "rank": 1, "step": 7,
            "event": "step_logged", "reward": 0.5,
        }
    ]  # fmt: skip
    assert stat.S_IMODE((tmp_path / "journal.jsonl").stat().st_mode) == 0o600


@given(value=JSON)
def test_fields_are_read_as_they_were_written(make_folder: Callable[[], Path], value: object) -> None:
    """Any JSON value."""
    path = make_folder() / "journal.jsonl"
    Journal(path, "run-1").write(Anything(value=value))
    assert [record["value"] for record in read_records(path)] == [value]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("first\nsecond\r\nthird\u2028fourth", "first\nsecond\r\nthird\u2028fourth"),
        *((number, None) for number in (math.nan, math.inf, -math.inf)),  # not JSON
        ({"values": [math.nan, (math.inf,)]}, {"values": [None, [None]]}),
        *((rate, rate) for rate in (1e-6, 4.9e-7, 1.234e-9)),  # learning rates are not rounded to zero
        ("x" * 100_000, "x" * 16_384 + "…"),
        (Path("/tmp/x"), "/tmp/x"),
        ({"b"}, ["b"]),
        ("bad \udc80 name", "bad \udc80 name"),  # file names and decoded tokens may contain lone surrogates
    ],
)
def test_a_value_is_written_as_json_in_one_line(
    journal: Journal, tmp_path: Path, value: object, read: object
) -> None:
    """What is not JSON does not break the line."""
    journal.write(Anything(value=value))
    raw = (tmp_path / "journal.jsonl").read_bytes()
    assert raw.count(b"\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(raw, parse_constant=refuse)["value"] == read


def test_a_long_event_with_a_value_of_another_type_is_written(journal: Journal, events: Events) -> None:
    """As a short one is: nothing that a rank or the supervisor writes may end it."""
    journal.write(WarningGiven(rank="none", text="x" * 20_000))  # type: ignore[arg-type]
    (record,) = events()
    assert (record["rank"], record["text"]) == ("none", "x" * 16_384 + "…")


def test_the_length_of_a_line_is_bounded(journal: Journal, tmp_path: Path, events: Events) -> None:
    """An event with too many fields keeps only the common keys."""
    journal.write(Anything(rank=2, value=["é" * 1000] * 1000))
    assert len((tmp_path / "journal.jsonl").read_bytes()) <= MAX_LINE_BYTES
    record = events()[0]
    assert (record["event"], record["rank"]) == ("anything", 2)
    assert record["truncated_bytes"] > MAX_LINE_BYTES


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    """Each line is one write to a file opened with O_APPEND."""
    path = tmp_path / "journal.jsonl"

    def write(rank: int) -> None:
        mine = Journal(path, "run-1")
        for step in range(200):
            mine.write(Anything(rank=rank, step=step, value=str(rank) * 300))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = list(read_records(path))
    assert len(records) == 800
    assert all(set(record["value"]) == {str(record["rank"])} for record in records)
    for rank in range(4):
        assert [record["step"] for record in records if record["rank"] == rank] == list(range(200))


def test_a_partial_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    """Written byte by byte: no event is lost or read twice."""
    path = tmp_path / "journal.jsonl"
    line = '{"event":"warning","text":"fünf"}\n'.encode()
    reader = JournalReader(path, DECODER)
    found = []
    for end in range(len(line) + 1):
        path.write_bytes(line[:end])
        found += [(end, one.text) for one in reader.new() if isinstance(one, WarningGiven)]
    assert found == [(len(line), "fünf")]


def test_a_line_truncated_by_a_crash_is_skipped(journal: Journal, tmp_path: Path, events: Events) -> None:
    """A supervisor that resumes begins a new line."""
    journal.write(event("run_started"))
    with open(tmp_path / "journal.jsonl", "ab") as file:
        file.write(b'{"time":1000.0,"event":"step_comm')
    assert [record["event"] for record in events()] == ["run_started"]
    Journal(tmp_path / "journal.jsonl", "run-1").write(event("run_ended"))
    assert [record["event"] for record in events()] == ["run_started", "run_ended"]


@pytest.mark.parametrize(
    "line", [b"not json", b"[1, 2]", b"null", b'{"no": "event"}', b"", b"\xff\xfe", b"[" * 10**6]
)
def test_lines_that_are_not_events_are_skipped(
    journal: Journal, tmp_path: Path, events: Events, line: bytes
) -> None:
    """The user may have edited the file."""
    with open(tmp_path / "journal.jsonl", "ab") as file:
        file.write(line + b"\n")
    journal.write(event("run_started"))
    assert [record["event"] for record in events()] == ["run_started"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_failing_disk_loses_events_and_raises_nothing(
    journal: Journal, events: Events, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Later events are written once the disk works again."""

    def fail(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", fail)
        assert not journal.write(event("warning", text="lost"))
    assert journal.lost == 1
    assert journal.write(event("warning", text="kept"))
    assert [record["text"] for record in events()] == ["kept"]


@pytest.mark.parametrize("other", [False, True])
def test_a_truncated_event_is_lost_and_the_next_ones_are_not(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events, other: bool
) -> None:
    """The last block of a full disk holds a part of the line, of this process or of another one."""
    first = Journal(tmp_path / "journal.jsonl", "run-1") if other else journal
    write = os.write
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        assert not first.write(event("warning", text="cut"))
    assert first.lost == 1
    assert journal.write(event("warning", text="whole"))
    assert first.write(event("warning", text="whole too"))
    assert [record["text"] for record in events()] == ["whole", "whole too"]
    assert first.lost == 1


def test_a_line_without_its_newline_is_not_lost(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    """The next writer adds the newline; reported as lost, the event would count twice."""
    write = os.write
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-1]))
        assert journal.write(event("warning", text="first"))
    journal.write(event("warning", text="second"))
    assert [record["text"] for record in events()] == ["first", "second"]
    assert journal.lost == 0


def test_a_failed_fsync_is_counted_and_raises_nothing(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems report a full disk only then."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    journal.write(event("run_started"))
    monkeypatch.setattr(os, "fsync", fail)
    journal.sync()
    assert journal.lost == 1


def test_a_journal_that_cannot_be_read_is_read_later(tmp_path: Path) -> None:
    """The run has not begun, or a network file system is unavailable for a while."""
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path, DECODER)
    assert list(reader.new()) == []
    path.mkdir()
    assert list(reader.new()) == []
    path.rmdir()
    path.write_text('{"event":"run_started"}\n')
    assert [event_name(one) for one in reader.new()] == ["run_started"]


def test_a_long_journal_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a part ends, no event is lost or read twice."""
    path = tmp_path / "journal.jsonl"
    writer = Journal(path, "run-1")
    for step in range(50):
        writer.write(event("step_committed", step=step))
    for size in (1, 7, 100, 1000):
        monkeypatch.setattr(journal_module, "READ_BYTES", size)
        assert [record["step"] for record in read_records(path)] == list(range(50))


def test_a_file_without_newlines_is_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a line that is too long to be an event is enough."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 10 * MAX_LINE_BYTES)
    reader = JournalReader(path, DECODER)
    assert list(reader.new()) == []
    assert len(reader._partial_line) <= 2 * MAX_LINE_BYTES


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    """It has no part in the run."""
    path = tmp_path / "journal.jsonl"
    writer = Journal(path, "run-1")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if writer.write(event("warning", text="from the child")) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert list(read_records(path)) == []


def test_the_script_may_close_every_descriptor_and_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    """The journal keeps none open, so a number that the script uses again gets none of our lines."""
    monkeypatch.chdir(tmp_path)
    journal = Journal(Path("journal.jsonl"), "run-1")
    before = set(os.listdir("/proc/self/fd"))
    assert journal.write(event("warning", text="x"))
    # others may have been closed meanwhile, as what earlier tests left is collected
    assert set(os.listdir("/proc/self/fd")) <= before
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert journal.write(event("warning", text="y"))
    assert [one["text"] for one in events()] == ["x", "y"]


def test_a_file_that_cannot_be_opened_only_loses_events(tmp_path: Path, events: Events) -> None:
    """A rank trains on a disk that refuses the file, and writes to it as soon as it can."""
    path = tmp_path / "journal.jsonl"
    path.mkdir()
    journal = Journal(path, "run-1")
    assert not journal.write(event("warning", text="x"))
    assert journal.lost == 1
    path.rmdir()
    assert journal.write(event("warning", text="y"))
    assert [one["text"] for one in events()] == ["y"]
