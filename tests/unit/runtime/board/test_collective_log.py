"""The collective log: entries are read as they were written, oldest first, and never partially."""

from __future__ import annotations

import math
import mmap
import struct
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.collective_entries import add_entry

from grpo_run.runtime.board.collective_log import (
    ENTRIES,
    ENTRY_BYTES,
    LOG_BYTES,
    CollectiveLogWriter,
    read_collective_log,
)
from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.verdict import Location

OFFSET, NUMBER_AT = 64, 8


@pytest.fixture
def memory() -> mmap.mmap:
    """Zeroed memory for one log, with other data on both sides."""
    return mmap.mmap(-1, OFFSET + LOG_BYTES + ENTRY_BYTES)


@pytest.fixture
def writer(memory: mmap.mmap) -> CollectiveLogWriter:
    """Writer of the log."""
    return CollectiveLogWriter(memory, OFFSET, NUMBER_AT)


def entries(memory: mmap.mmap) -> tuple[Collective, ...]:
    """Read the log as it is now."""
    log = memory[OFFSET : OFFSET + LOG_BYTES]
    return read_collective_log(log, log)


def add(writer: CollectiveLogWriter, **changes: Any) -> int:
    """Log an all-reduce of two tensors."""
    fields: dict[str, Any] = {
        "group": "0", "sequence": 41, "operation": "allreduce", "sizes": "2,3;7", "dtypes": "Float;Long",
        "file": "/home/user/train.py", "line": 88, "function": "reward", "step": 8, "members": 0b1011,
    }  # fmt: skip
    return add_entry(writer, **(fields | changes))


def test_an_entry_is_read_as_it_was_written(memory: mmap.mmap, writer: CollectiveLogWriter) -> None:
    """Every field; the operation under its normalized name."""
    assert entries(memory) == ()
    add(writer, point_to_point=True, progress=CollectiveProgress.waiting)
    (note,) = entries(memory)
    assert (note.group, note.sequence, note.operation, note.step) == ("0", 41, "all_reduce", 8)
    assert (note.sizes, note.dtypes, note.members) == (((2, 3), (7,)), ("Float", "Long"), (0, 1, 3))
    assert note.location == Location(file="/home/user/train.py", line=88, function="reward")
    assert (note.progress, note.point_to_point) == (CollectiveProgress.waiting, True)


@pytest.mark.parametrize("many", [ENTRIES - 1, ENTRIES, ENTRIES + 1, 2 * ENTRIES + 5])
def test_the_log_keeps_the_newest_entries_in_order(
    memory: mmap.mmap, writer: CollectiveLogWriter, many: int
) -> None:
    """Oldest first, as many as fit; nothing outside the log is written."""
    before, behind = memory[:NUMBER_AT], memory[OFFSET + LOG_BYTES :]
    for sequence in range(1, many + 1):
        add(writer, sequence=sequence)
    kept = range(max(1, many - ENTRIES + 1), many + 1)
    assert [note.sequence for note in entries(memory)] == list(kept)
    assert (memory[:NUMBER_AT], memory[OFFSET + LOG_BYTES :]) == (before, behind)


def test_the_waiting_thread_is_recorded_while_it_waits(
    memory: mmap.mmap, writer: CollectiveLogWriter
) -> None:
    """It may differ from the thread that issued the collective."""
    own = str(threading.get_ident())
    number = add(writer)
    assert entries(memory)[0].thread == own
    waiting: list[int] = []

    def wait() -> None:
        waiting.append(threading.get_ident())
        writer.mark(number, CollectiveProgress.waiting)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(10)
    assert entries(memory)[0].thread == str(waiting[0]) != own


def at(file: str) -> Location:
    """The line that is logged, in another file."""
    return Location(file=file, line=88, function="reward")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"operation": "broadcast", "root": 2}, {"root": 2, "count": 1}),
        ({"operation": "reduce", "root": 0}, {"root": 0}),
        ({"operation": "broadcast"}, {"root": -1}),
        ({"operation": "allreduce"}, {"root": -1, "count": 1}),
        ({"limited": True}, {"timeout_seconds": 0.0}),
        ({"limited": False}, {"timeout_seconds": math.inf}),
        ({"on_device": True}, {"on_device": True, "point_to_point": False}),
        ({"point_to_point": True}, {"point_to_point": True, "on_device": False}),
        # a truncated list would compare unequal, and a truncated name is no dtype: complete or left out
        ({"sizes": ""}, {"sizes": ()}),
        ({"sizes": "7"}, {"sizes": ((7,),)}),
        ({"sizes": ";3"}, {"sizes": ((), (3,))}),
        ({"sizes": ",".join(["1000000"] * 4)}, {"sizes": ((1000000,) * 4,)}),
        ({"sizes": ";".join(["1024"] * 7)}, {"sizes": ()}),
        *(({"sizes": symbolic}, {"sizes": ()}) for symbolic in ("s0,3", "2,3;u1")),
        ({"dtypes": "Float;Long"}, {"dtypes": ("Float", "Long")}),
        ({"dtypes": "BFloat16;BFloat16"}, {"dtypes": ("BFloat16", "BFloat16")}),
        ({"dtypes": ";".join(["BFloat16"] * 4)}, {"dtypes": ()}),
        ({"file": "", "line": 0, "function": ""}, {"location": None}),
        # of a long path the end stays; file names may contain bytes that are not UTF-8
        ({"file": "/very" * 30 + "/train.py"}, {"location": at(("/very" * 30 + "/train.py")[-64:])}),
        ({"file": "/home/\udcff/train.py"}, {"location": at("/home/?/train.py")}),
    ],
)
def test_what_a_collective_needs_is_recorded(
    memory: mmap.mmap, writer: CollectiveLogWriter, given: dict[str, Any], read: dict[str, Any]
) -> None:
    """Its root, whether its sequence number, completion and time limit are its own, and where it is."""
    add(writer, **given)
    (entry,) = entries(memory)
    assert {name: getattr(entry, name) for name in read} == read


@pytest.mark.parametrize("count", [0, 1, 3, 70_000])
def test_the_number_of_collectives_that_an_entry_stands_for_is_amended(
    memory: mmap.mmap, writer: CollectiveLogWriter, count: int
) -> None:
    """Zero if nothing was issued; an overwritten entry is ignored."""
    number = add(writer)
    writer.amend(number, count=count)
    writer.exclude(number + ENTRIES)
    writer.amend(number + ENTRIES, count=9)
    (entry,) = entries(memory)
    assert (entry.count, entry.point_to_point) == (min(count, 0xFFFF), False)
    writer.exclude(number)
    assert entries(memory)[0].point_to_point


def test_an_entry_written_during_another_does_not_deadlock(
    memory: mmap.mmap, writer: CollectiveLogWriter
) -> None:
    """A signal handler may issue a collective in the same thread; both entries are complete."""

    class Interrupted:
        """Members whose conversion is interrupted by a signal handler that issues a collective."""

        def __index__(self) -> int:
            add(writer, sequence=42)
            return 0b11

    arguments = {"members": Interrupted()}
    thread = threading.Thread(target=add, args=(writer,), kwargs=arguments, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert [(note.sequence, note.sizes) for note in entries(memory)] == [
        (41, ((2, 3), (7,))),
        (42, ((2, 3), (7,))),
    ]


def test_a_mark_on_an_overwritten_entry_is_ignored(memory: mmap.mmap, writer: CollectiveLogWriter) -> None:
    """A late wait must not mark the entry that has replaced it."""
    first = add(writer)
    for _ in range(ENTRIES):
        add(writer)
    writer.mark(first, CollectiveProgress.completed)
    assert {note.progress for note in entries(memory)} == {CollectiveProgress.enqueued}


def test_an_incomplete_entry_is_not_read(memory: mmap.mmap, writer: CollectiveLogWriter) -> None:
    """Its rank was killed during the write: the number, which is written last, is still 0."""
    add(writer, sequence=1)
    add(writer, sequence=2)
    struct.pack_into("<Q", memory, OFFSET, 0)
    assert [note.sequence for note in entries(memory)] == [2]


def test_the_number_is_written_after_the_entry(memory: mmap.mmap, writer: CollectiveLogWriter) -> None:
    """A failed write leaves no entry and does not change the last number."""
    for _ in range(ENTRIES):
        add(writer)
    with pytest.raises(struct.error):
        add(writer, line=2**40)
    assert struct.unpack_from("<Q", memory, NUMBER_AT) == (ENTRIES,)
    assert len(entries(memory)) == ENTRIES - 1


@given(file=st.text(max_size=120), function=st.text(max_size=60), group=st.text("abc019:/_", max_size=60))
def test_any_name_can_be_logged(file: str, function: str, group: str) -> None:
    """Names of files and functions are limited in size and stay readable; other fields are not affected."""
    memory = mmap.mmap(-1, OFFSET + LOG_BYTES)
    writer = CollectiveLogWriter(memory, OFFSET, NUMBER_AT)
    add(writer, file=file, function=function, group=group)
    (note,) = entries(memory)
    assert (note.sequence, note.step, note.members) == (41, 8, (0, 1, 3))
