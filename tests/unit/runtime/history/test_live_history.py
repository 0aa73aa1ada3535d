"""Every event counts exactly once: the supervisor's own at once, those of ranks when they are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journal import event, read_records

from grpo_run.runtime.history.events import WarningGiven
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import read_journal
from grpo_run.runtime.history.reporter import LiveHistory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal that does not exist yet."""
    return tmp_path / "journal.jsonl"


def open_rank(path: Path) -> Journal:
    """The journal as a rank of the first attempt writes it."""
    journal = Journal(path, "night")
    journal.attempt = 0
    return journal


def test_an_own_event_counts_without_reading_the_file(path: Path) -> None:
    """A decision never depends on reading back what was just written: the file cannot be opened here."""
    live = LiveHistory(path, "night")
    path.mkdir()
    live.write(event("warning", text="x"))
    assert live.history.warnings == 1


def test_own_events_with_equal_lines_count_once_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two events within one tick of the clock have the same line."""
    live = LiveHistory(path, "night")
    monkeypatch.setattr(live, "journal", Journal(path, "night", wall=lambda: 1.0, monotonic=lambda: 1.0))
    live.write(event("warning", text="x"))
    live.write(event("warning", text="x"))
    live.read_ranks()
    assert live.history.warnings == 2


def test_events_of_ranks_between_own_events_count_once(path: Path) -> None:
    """Lines of both are interleaved in one file; the result is that of replaying the file."""
    seen: list[str] = []
    live = LiveHistory(path, "night")
    live.follow(WarningGiven, lambda event: seen.append(event.text))
    rank = open_rank(path)
    for number in range(20):
        rank.write(event("warning", rank=1, text=f"rank {number}"))
        if number % 3 == 0:
            live.write(event("warning", text="own"))
        if number % 7 == 0:
            live.read_ranks()
    live.read_ranks()
    assert seen == [f"rank {number}" for number in range(20)]
    assert live.history.warnings == 27 == History.of(read_journal(path)).warnings


def test_events_of_ranks_are_applied_before_a_later_own_event(path: Path) -> None:
    """A snapshot that was complete before the fault does not refill the restart budget after it."""
    live = LiveHistory(path, "night")
    open_rank(path).write(
        event("checkpoint_staged", rank=0, step=7, train_call=1, scheduled=False, seconds=0.1)
    )
    live.write(event("incident", cause="signal", culprit=0, sentence="Rank 0 was killed."))
    assert live.history.failures_without_progress == 1
    assert live.history.snapshot_step == 7


def test_a_second_supervisor_replays_every_event_once(path: Path) -> None:
    """Own events of the first one are read from the file like those of ranks."""
    first = LiveHistory(path, "night")
    first.write(event("warning", text="own"))
    open_rank(path).write(event("warning", rank=0, text="rank"))
    second = LiveHistory(path, "night")
    second.write(event("warning", text="own"))
    second.read_ranks()
    assert second.history.warnings == 3


def refuse(data: bytes) -> bytes:
    """Take nothing."""
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("taken", "texts"),
    [
        (refuse, ["rank"]),
        (lambda data: data[:20], ["rank"]),  # a line that is truncated is no event for any reader
        (lambda data: data[:-1], ["own", "rank"]),  # the next writer adds the newline
    ],
)
def test_an_event_that_the_disk_does_not_take_whole_counts_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, taken: Callable[[bytes], bytes], texts: list[str]
) -> None:
    """`write` returns whether the file has the event."""
    live, write = LiveHistory(path, "night"), os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda descriptor, data: write(descriptor, taken(data)))
        assert live.write(event("warning", text="own")) is ("own" in texts)
    live.read_ranks()
    open_rank(path).write(event("warning", rank=0, text="rank"))
    live.read_ranks()
    assert live.history.warnings == 2
    assert [record["text"] for record in read_records(path)] == texts


def test_an_event_too_long_for_a_line_is_applied_with_its_fields(path: Path) -> None:
    """The file keeps only that it happened; the supervisor knows the rest and decides from it."""
    live = LiveHistory(path, "night")
    fields: dict[str, Any] = {
        "cause": "signal",
        "culprit": 0,
        "sentence": "x",
        "shortage": {"many": ["é" * 1000] * 1000},
    }
    live.write(event("incident", **fields))
    live.read_ranks()
    assert [recovery.cause for recovery in live.history.recoveries] == ["signal"]
    assert next(read_records(path))["truncated_bytes"] > 0


def test_events_after_a_truncation_count(path: Path) -> None:
    """Not only once the file has grown beyond its former size; none counts twice."""
    live, rank = LiveHistory(path, "night"), open_rank(path)
    for _ in range(5):
        rank.write(event("warning", text="x"))
    live.read_ranks()
    os.truncate(path, 0)
    live.read_ranks()
    rank.write(event("warning", text="y"))
    live.read_ranks()
    assert live.history.warnings == 6


def test_a_run_directory_that_was_put_back_from_a_copy_has_all_events(path: Path) -> None:
    """Of the supervisor and of ranks, which go on as they are."""
    live, rank = LiveHistory(path, "night"), open_rank(path)
    live.write(event("warning", text="x"))
    rank.write(event("warning", text="y"))
    copy = path.read_bytes()
    path.rename(path.with_name("moved"))
    path.write_bytes(copy)
    rank.write(event("warning", text="z"))
    live.write(event("warning", text="last"))
    live.read_ranks()
    assert live.history.warnings == 4
    assert [one["text"] for one in read_records(path)] == ["x", "y", "z", "last"]
