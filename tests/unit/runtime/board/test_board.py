"""The board: a reader sees exactly what a rank has written, or nothing."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.collective_entries import add_entry

from grpo_run.runtime.board import board as board_module
from grpo_run.runtime.board import slot_writer
from grpo_run.runtime.board.accounting.memory_area import MEMORY_AREA_BYTES
from grpo_run.runtime.board.board import HEADER_BYTES, Board
from grpo_run.runtime.board.callback_table import CALLBACKS_BYTES
from grpo_run.runtime.board.collective_log import ENTRIES
from grpo_run.runtime.board.exchange import EXCHANGE_BYTES
from grpo_run.runtime.board.slot_layout import MAX_OPEN_PHASES, SLOT_BYTES
from grpo_run.runtime.board.slot_writer import SlotWriter, phases_of
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState, Slot

INT32 = st.integers(-(2**31), 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOAT = st.floats(allow_nan=False)
FIELDS = {
    "train_call": INT32, "step": INT32, "target_steps": INT32, "voted_step": INT32, "committed_step": INT32,
    "resumed_step": INT32, "checkpoint_step": INT32, "tokens_generated": UINT64, "rewards_scored": UINT64,
    "votes": UINT64, "hygiene_runs": UINT64, "vote_wait_seconds": FLOAT, "hygiene_seconds": FLOAT,
    "checkpoint_seconds": FLOAT, "reward": FLOAT, "completion_length": FLOAT, "loss": FLOAT,
    "grad_norm": FLOAT, "learning_rate": FLOAT, "ended_eos": FLOAT, "ended_deadline": FLOAT, "state": st.sampled_from(RankState),
}  # fmt: skip
"""Every attribute of a writer that a reader sees under the same name."""


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board with two slots."""
    return Board.create(tmp_path / "board.mmap", 2)


@pytest.fixture
def writer(board: Board) -> SlotWriter:
    """The slot of local rank 1, which is global rank 5."""
    return board.writer(1, rank=5, pid=4711, attempt=3)


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Make the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def seen(board: Board, index: int = 1) -> Slot:
    """Return a reading that must exist."""
    slot = board.read(index)
    assert slot is not None
    return slot


def test_a_slot_identifies_its_rank(board: Board, writer: SlotWriter) -> None:
    """A new slot has global rank, local rank, pid and attempt."""
    slot = seen(board)
    assert (slot.rank, slot.local_rank, slot.pid, slot.attempt) == (5, 1, 4711, 3)
    assert slot.state is RankState.starting
    assert slot.phases == ()


def test_a_slot_never_written_is_unknown(board: Board) -> None:
    """It is not read as a healthy rank at step 0."""
    assert board.read(0) is None
    assert board.read_all() == [None, None]


@given(values=st.fixed_dictionaries(FIELDS))
def test_every_field_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    """The test covers the full range of each field."""
    board = Board.create(tmp_path_factory.mktemp("board") / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=1, attempt=0)
    for name, value in values.items():
        setattr(writer, name, value)
    writer.publish()
    slot = seen(board, 0)
    assert {name: getattr(slot, name) for name in values} == values


def test_every_field_of_a_reading_has_a_writer(writer: SlotWriter) -> None:
    """A field that is missing in the writer would stay zero."""
    clocks = {"voted_at_seconds": "voted_at_ns", "train_started_seconds": "train_started_ns"}
    stamped = {"rank", "local_rank", "pid", "attempt", "phases", "last_progress_seconds", "writes"}
    stamped |= {"heartbeat_seconds", "last_work_seconds", "collectives_issued", "last_collective_seconds"}
    stamped |= {"generation_passes"}
    stamped |= {"heartbeat_thread", "idle_threads"}
    names = {clocks.get(name, name) for name in Slot.__dataclass_fields__} - stamped
    assert {name for name in names if not hasattr(writer, name)} == set()


def test_times_are_monotonic_seconds(board: Board, writer: SlotWriter) -> None:
    """Written in nanoseconds, read in seconds."""
    writer.voted_at_ns = 1_500_000_000
    writer.train_started_ns = 250_000_000
    before = time.monotonic()
    writer.publish()
    slot = seen(board)
    assert (slot.voted_at_seconds, slot.train_started_seconds) == (1.5, 0.25)
    assert before - 1e-3 <= slot.last_progress_seconds <= time.monotonic()


@pytest.mark.parametrize("name", ["reward", "completion_length", "loss", "grad_norm", "learning_rate"])
def test_a_gauge_never_set_is_nan(board: Board, writer: SlotWriter, name: str) -> None:
    """Zero would be a value."""
    assert math.isnan(getattr(seen(board), name))


def test_phases_nest(board: Board, writer: SlotWriter) -> None:
    """Outermost first, each with its start; leaving one makes the enclosing one current."""
    writer.enter(Phase.data)
    writer.enter(Phase.score)
    writer.enter(Phase.reward)
    phases = seen(board).phases
    assert [entry.phase for entry in phases] == [Phase.data, Phase.score, Phase.reward]
    assert [entry.since_seconds for entry in phases] == sorted(entry.since_seconds for entry in phases)
    writer.leave(Phase.reward)
    assert seen(board).phase is Phase.score


def fail_in(writer: SlotWriter, *phases: Phase) -> ValueError:
    """Raise in nested phases; return the exception after it has left all of them."""
    error = ValueError("broken")

    def inside(remaining: tuple[Phase, ...]) -> None:
        if not remaining:
            raise error
        try:
            writer.enter(remaining[0])
            inside(remaining[1:])
        finally:
            writer.leave(remaining[0])

    with pytest.raises(ValueError, match="broken"):
        inside(phases)
    return error


def test_an_exception_keeps_the_phases_that_it_was_raised_in(writer: SlotWriter) -> None:
    """The innermost one is left first. Without an open callback, none is named."""
    error = fail_in(writer, Phase.data, Phase.score, Phase.reward)
    assert phases_of(error) == ((Phase.data, Phase.score, Phase.reward), "")
    assert phases_of(ValueError("outside")) is None


def _call(function: Callable[[], None]) -> None:
    function()


def test_a_phase_that_is_left_while_an_exception_is_handled_is_not_its(writer: SlotWriter) -> None:
    """The script may evaluate in an `except` block and raise again."""
    error = ValueError("broken")
    try:
        raise error
    except ValueError:
        writer.enter(Phase.eval)
        leave = partial(writer.leave, Phase.eval)
        _call(leave)
    assert phases_of(error) is None


def test_an_exception_of_a_callback_names_it(writer: SlotWriter) -> None:
    """Class and event."""
    error = ValueError("broken")

    def on_save() -> None:
        try:
            writer.enter_callback("Mine.on_save")
            raise error
        finally:
            writer.leave(Phase.callback)

    with pytest.raises(ValueError, match="broken"):
        on_save()
    assert phases_of(error) == ((Phase.callback,), "Mine.on_save")


def test_leaving_a_phase_closes_the_phases_inside_it(board: Board, writer: SlotWriter) -> None:
    """An exception may skip the end of an inner phase."""
    for phase in (Phase.data, Phase.score, Phase.reward):
        writer.enter(phase)
    writer.leave(Phase.data)
    assert seen(board).phases == ()


def test_leaving_the_same_phase_twice_nested_closes_the_inner_one(board: Board, writer: SlotWriter) -> None:
    """A reward function may call another."""
    writer.enter(Phase.reward)
    writer.enter(Phase.reward)
    writer.leave(Phase.reward)
    assert [entry.phase for entry in seen(board).phases] == [Phase.reward]


def test_leaving_a_phase_that_is_not_open_changes_nothing(board: Board, writer: SlotWriter) -> None:
    """`replace` may have closed it already."""
    writer.enter(Phase.data)
    writer.leave(Phase.vote)
    assert [entry.phase for entry in seen(board).phases] == [Phase.data]


def test_replacing_closes_all_open_phases(board: Board, writer: SlotWriter) -> None:
    """It sets the outermost phase of a step."""
    writer.enter(Phase.data)
    writer.enter(Phase.generate)
    writer.replace(Phase.optimizer)
    assert [entry.phase for entry in seen(board).phases] == [Phase.optimizer]


def test_only_the_innermost_phases_are_published(board: Board, writer: SlotWriter) -> None:
    """The writer remembers the others: leaving makes them visible again."""
    phases = [Phase(1 + index % len(Phase)) for index in range(MAX_OPEN_PHASES + 3)]
    for phase in phases:
        writer.enter(phase)
    assert [entry.phase for entry in seen(board).phases] == phases[-MAX_OPEN_PHASES:]
    for phase in reversed(phases[3:]):
        writer.leave(phase)
    assert [entry.phase for entry in seen(board).phases] == phases[:3]


def test_state_is_published_with_a_phase(board: Board, writer: SlotWriter) -> None:
    """A change of state does not wait for the next `publish`."""
    writer.state = RankState.training
    writer.enter(Phase.data)
    assert seen(board).state is RankState.training


def test_writes_are_counted(board: Board, writer: SlotWriter) -> None:
    """A rank that writes is running."""
    before = seen(board).writes
    writer.enter(Phase.data)
    assert seen(board).writes > before


def test_slots_are_independent(board: Board, writer: SlotWriter) -> None:
    """A write to one slot does not change another."""
    writer.reward = 0.25
    writer.publish()
    before = repr(seen(board))
    neighbour = board.writer(0, rank=4, pid=4710, attempt=3)
    neighbour.reward = 0.75
    neighbour.publish()
    assert repr(seen(board)) == before  # as text: gauges never set are NaN, which equals nothing
    assert seen(board, 0).reward == 0.75


def set_sequence(path: Path, number: int) -> None:
    """Write the sequence number of local rank 1's slot."""
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + SLOT_BYTES)
        file.write(struct.pack("<Q", number))


def test_a_write_under_way_is_not_read(board: Board, writer: SlotWriter, tmp_path: Path) -> None:
    """A reader that has no earlier reading does not know the rank's state."""
    for number, readable in ((7, False), (8, True)):
        set_sequence(tmp_path / "board.mmap", number)
        assert (board.read(1) is not None) is readable


def test_during_a_write_the_last_reading_is_returned_with_the_present_heartbeat(
    board: Board, writer: SlotWriter, tmp_path: Path
) -> None:
    """A writer that a garbage collection or a signal stops in the middle of a write is not unobserved."""
    writer.step = 3
    writer.publish()
    before = seen(board)
    set_sequence(tmp_path / "board.mmap", 7)
    writer.heartbeat()
    writer.record_work()
    during = seen(board)
    assert (during.step, during.writes) == (3, before.writes)
    assert during.heartbeat_seconds > before.heartbeat_seconds
    assert during.last_work_seconds > before.last_work_seconds
    board.begin_attempt(1)
    assert board.read(1) is None


def test_two_threads_that_write_at_once_leave_a_readable_slot(
    board: Board, writer: SlotWriter, often_switching: None
) -> None:
    """Whichever write ends last, the sequence number is even afterwards."""
    threads = [
        threading.Thread(target=lambda: [writer.publish() for _ in range(2000)] and None) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.read(1) is not None


def test_a_reading_that_overlaps_a_write_is_repeated(
    board: Board, writer: SlotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence number changed during the reading."""
    numbers = iter([2, 4, 6, 6])
    # the number as seen while a writer is at work
    for name in ("VERSION", "SEQUENCE"):
        overtaken = SimpleNamespace(unpack_from=lambda memory, offset: (next(numbers),))
        monkeypatch.setattr(board_module, name, overtaken)
    assert seen(board).writes == 3
    assert next(numbers, None) is None


def test_a_concurrent_reader_sees_consistent_slots_only(
    board: Board, writer: SlotWriter, often_switching: None
) -> None:
    """Fields that are always written equal are always read equal."""
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            writer.step = writer.voted_step = writer.committed_step = writer.votes = count
            writer.reward = writer.loss = float(count)
            writer.publish()

    thread = threading.Thread(target=write)
    thread.start()
    readings = []
    try:
        for _ in range(100_000):
            slot = board.read(1)
            if slot is None:
                time.sleep(0)  # the writer sleeps in the middle of a write: let it continue
            elif slot.step:
                readings.append(slot)
            if len(readings) == 500:
                break
    finally:
        stop.set()
        thread.join()
    assert len(readings) == 500
    torn = [
        slot
        for slot in readings
        if len({slot.step, slot.voted_step, slot.committed_step, slot.votes, slot.reward, slot.loss}) != 1
    ]
    assert torn == []


@pytest.mark.parametrize("part", ["OPEN_PHASES", "write_integers", "write_floats"])
def test_an_interrupted_write_does_not_make_the_slot_unreadable(
    board: Board, writer: SlotWriter, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A signal handler of the script may raise at any point.

    The next complete write makes the slot readable again.
    """
    with monkeypatch.context() as patched:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        struct_like = type("Interrupted", (), {"pack": staticmethod(interrupted)})
        patched.setattr(slot_writer, part, interrupted if part.startswith("write") else struct_like)
        with pytest.raises(KeyboardInterrupt):
            writer.publish()
    writer.step = 8
    writer.publish()
    assert seen(board).step == 8


def test_the_slot_outlives_its_writer(tmp_path: Path) -> None:
    """Another mapping reads it after the writer's mapping is closed."""
    path = tmp_path / "board.mmap"
    created = Board.create(path, 1)
    rank = Board.open(path, writable=True)
    writer = rank.writer(0, rank=0, pid=1, attempt=0)
    writer.step = 41
    writer.enter(Phase.generate)
    writer.publish()
    del rank, writer  # closes the mapping
    assert seen(created, 0).step == 41
    assert seen(Board.open(path), 0).phase is Phase.generate


def test_the_file_is_private(tmp_path: Path) -> None:
    """Its mode is 0600 for any umask."""
    before = os.umask(0)
    try:
        Board.create(tmp_path / "board.mmap", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "board.mmap").stat().st_mode) == 0o600


def test_creating_replaces_by_rename(tmp_path: Path) -> None:
    """A reader of the old board keeps its mapping; no temporary file remains."""
    path = tmp_path / "board.mmap"
    old = Board.create(path, 1)
    old.writer(0, rank=0, pid=1, attempt=0)
    new = Board.create(path, 2)
    assert old.read(0) is not None
    assert new.read_all() == [None, None]
    assert [file.name for file in tmp_path.iterdir()] == ["board.mmap"]


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    """Read-only commands map the file read-only."""
    Board.create(tmp_path / "board.mmap", 1)
    with pytest.raises(TypeError):
        Board.open(tmp_path / "board.mmap").request_stop()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no readable board"),
        (b"GRPOBRD2", "not a board"),
        (b"SOMETHING" + bytes(HEADER_BYTES + SLOT_BYTES), "not a board"),
        (b"GRPOBRD2" + struct.pack("<II", 2, SLOT_BYTES) + bytes(HEADER_BYTES), "truncated"),
        (b"GRPOBRD2" + struct.pack("<II", 1, 512) + bytes(HEADER_BYTES + SLOT_BYTES), "another version"),
    ],
)
def test_a_file_that_is_no_board_is_rejected(tmp_path: Path, content: bytes, reason: str) -> None:
    """Empty, foreign, truncated or of another layout: the error is one line."""
    (tmp_path / "board.mmap").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=reason):
        Board.open(tmp_path / "board.mmap")


def test_a_missing_board_is_rejected(tmp_path: Path) -> None:
    """The error names the path."""
    with pytest.raises(RunDirectoryError, match=str(tmp_path / "board.mmap")):
        Board.open(tmp_path / "board.mmap")


def test_a_slot_index_out_of_range_is_rejected(board: Board) -> None:
    """A wrong local rank must not write to another slot or past the end."""
    for index in (-1, 2):
        with pytest.raises(IndexError):
            board.writer(index, rank=0, pid=1, attempt=0)


def test_requests_reach_every_mapping(tmp_path: Path) -> None:
    """A command writes them, the ranks read them."""
    path = tmp_path / "board.mmap"
    Board.create(path, 1)
    rank = Board.open(path, writable=True)
    assert rank.requests == (False, 0)
    asking = Board.open(path, writable=True)
    asking.request_save()
    asking.request_save()
    assert rank.requests == (False, 2)
    asking.request_stop()
    assert rank.requests == (True, 2)


def test_a_request_does_not_change_the_slots(board: Board, writer: SlotWriter) -> None:
    """Header and slots are separate."""
    before = repr(seen(board))
    board.request_save()
    board.request_stop()
    assert repr(seen(board)) == before


def test_a_new_attempt_starts_with_an_empty_board(board: Board, writer: SlotWriter) -> None:
    """Slots are unknown, the stop request is cleared, and the attempt's number is the new one."""
    board.request_stop()
    board.begin_attempt(4)
    assert board.read_all() == [None, None]
    assert board.requests[0] is False
    assert board.attempt == 4


def test_requested_saves_are_counted_over_attempts(board: Board) -> None:
    """A rank compares with the count at its start; a smaller count would hide the next request."""
    board.request_save()
    before = board.requests[1]
    board.begin_attempt(1)
    board.request_save()
    assert board.requests[1] > before


def test_heartbeat_and_work_are_no_writes(board: Board, writer: SlotWriter) -> None:
    """Any thread may stamp them, so they do not use the seqlock."""
    before = seen(board)
    assert (before.heartbeat_seconds > 0, before.last_work_seconds) == (True, 0.0)
    writer.record_work()
    after = seen(board)
    assert after.last_work_seconds >= before.heartbeat_seconds
    assert (after.writes, after.heartbeat_seconds) == (before.writes, before.heartbeat_seconds)
    writer.heartbeat()
    assert seen(board).heartbeat_seconds >= after.last_work_seconds
    assert seen(board).last_work_seconds == after.last_work_seconds


@pytest.mark.parametrize("name", ["tokens_generated", "rewards_scored"])
def test_measured_work_is_progress_and_publishing_is_not(board: Board, writer: SlotWriter, name: str) -> None:
    """A rank that only publishes its slot again has done no work."""
    writer.publish()
    assert seen(board).last_work_seconds == 0.0
    setattr(writer, name, 5)
    writer.publish()
    counted = seen(board).last_work_seconds
    assert counted > 0.0
    writer.publish()
    assert seen(board).last_work_seconds == counted


def test_the_collective_log_belongs_to_its_slot(board: Board, writer: SlotWriter) -> None:
    """The reading has the number of entries; another slot has none; the other fields do not change."""
    before, began = seen(board), time.monotonic()
    for sequence in range(1, 301):
        add_entry(writer.collective_log, sequence=sequence)
    after = seen(board)
    assert began <= after.last_collective_seconds <= time.monotonic()
    last = after.last_collective_seconds
    expected = dataclasses.replace(before, collectives_issued=300, last_collective_seconds=last)
    assert repr(after) == repr(expected)
    assert board.collective_log(1)[-1].sequence == 300
    assert board.collective_log(0) == ()
    assert board.read(0) is None


def log_collective(
    writer: SlotWriter,
    *,
    operation: str = "allreduce",
    on_device: bool = False,
    progress: CollectiveProgress = CollectiveProgress.enqueued,
) -> int:
    """Log one collective and return its number."""
    return add_entry(writer.collective_log, operation=operation, on_device=on_device, progress=progress)


def test_a_wait_is_seen_in_an_older_entry(board: Board, writer: SlotWriter) -> None:
    """Once it is over, the rank is in no collective."""
    assert not board.may_be_in_collective(1, seen(board).collectives_issued)
    waited = log_collective(writer)
    assert not board.may_be_in_collective(
        1, seen(board).collectives_issued
    )  # it continues, and may wait later
    for _ in range(3):
        log_collective(writer)
    writer.collective_log.mark(waited, CollectiveProgress.waiting)
    assert board.may_be_in_collective(1, seen(board).collectives_issued)
    assert not board.may_be_in_collective(0, 0)
    writer.collective_log.mark(waited, CollectiveProgress.completed)
    assert not board.may_be_in_collective(1, seen(board).collectives_issued)


def test_a_wait_is_seen_at_every_place_of_the_ring(board: Board, writer: SlotWriter) -> None:
    """The entry may be the first, the last, or one written after the ring has wrapped.

    An overwritten entry no longer counts.
    """
    for _ in range(ENTRIES + 2):
        number = log_collective(writer)
        writer.collective_log.mark(number, CollectiveProgress.waiting)
        assert board.may_be_in_collective(1, seen(board).collectives_issued)
        writer.collective_log.mark(number, CollectiveProgress.completed)
        assert not board.may_be_in_collective(1, seen(board).collectives_issued)
    writer.collective_log.mark(log_collective(writer), CollectiveProgress.waiting)
    for _ in range(ENTRIES - 1):
        log_collective(writer)
        assert board.may_be_in_collective(1, seen(board).collectives_issued)
    log_collective(writer)
    assert not board.may_be_in_collective(1, seen(board).collectives_issued)


@pytest.mark.parametrize("progress", list(CollectiveProgress))
def test_the_last_entry_on_a_device_may_be_in_progress(
    board: Board, writer: SlotWriter, progress: CollectiveProgress
) -> None:
    """The host does not see when it completes.

    A later entry on the host shows that the rank has continued.
    """
    log_collective(writer, on_device=True, progress=progress)
    assert board.may_be_in_collective(1, seen(board).collectives_issued)
    log_collective(writer, progress=CollectiveProgress.completed)
    assert board.may_be_in_collective(1, seen(board).collectives_issued) is (
        progress is CollectiveProgress.waiting
    )


def test_a_forked_child_does_not_change_the_board(board: Board, writer: SlotWriter, tmp_path: Path) -> None:
    """It inherits the rank's mapping and is not the rank."""
    writer.replace(Phase.data)
    number = log_collective(writer, progress=CollectiveProgress.waiting)
    before = (tmp_path / "board.mmap").read_bytes()
    writer.detach()
    writer.heartbeat()
    writer.record_work()
    writer.state, writer.step, writer.tokens_generated = RankState.done, 99, 5
    writer.publish()
    writer.enter(Phase.reward)
    writer.leave(Phase.reward)
    for _ in range(2):
        writer.replace(Phase.generate)
    writer.collective_log.mark(number, CollectiveProgress.completed)
    writer.collective_log.mark(log_collective(writer), CollectiveProgress.completed)
    assert (tmp_path / "board.mmap").read_bytes() == before
    assert seen(board).phase is Phase.data


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(board: Board, writer: SlotWriter) -> None:
    """Another thread held the log's lock at the time of the fork."""
    writing, resume = threading.Event(), threading.Event()

    class Slow(str):
        """Text whose encoding takes until it is told to continue."""

        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            writing.set()
            resume.wait(10)
            return super().encode(encoding, errors)

    parent = threading.Thread(
        target=log_collective, args=(writer,), kwargs={"operation": Slow("all_reduce")}, daemon=True
    )
    parent.start()
    assert writing.wait(10)
    writer.detach()
    child = threading.Thread(target=log_collective, args=(writer,), daemon=True)
    child.start()
    child.join(10)
    assert not child.is_alive()
    resume.set()
    parent.join(10)


def test_every_way_to_end_a_phase_is_counted_once(board: Board, writer: SlotWriter) -> None:
    """Left, closed with an enclosing phase, or replaced; open phases are not counted."""
    for _ in range(3):
        writer.replace(Phase.data)
        writer.enter(Phase.score)
        writer.enter(Phase.reward)
        writer.leave(Phase.reward)
        writer.enter(Phase.generate)
        writer.leave(Phase.score)  # and generate with it
    histograms = board.phase_histograms(1)
    assert {phase: durations.count + 1 for phase, durations in histograms.items()} == {
        Phase.data: 2, Phase.score: 3, Phase.reward: 3, Phase.generate: 3,
    }  # fmt: skip
    assert board.phase_histograms(0) == {}


def test_a_new_attempt_has_no_log_and_no_histograms(board: Board, writer: SlotWriter) -> None:
    """Neither does a slot that is claimed again in the same attempt."""

    def fill(writer: SlotWriter) -> None:
        writer.replace(Phase.data)
        writer.replace(Phase.vote)
        add_entry(writer.collective_log)

    fill(writer)
    fill(board.writer(1, rank=5, pid=4712, attempt=3))
    assert board.phase_histograms(1)[Phase.data].count == 0
    assert len(board.collective_log(1)) == 1
    board.begin_attempt(4)
    assert (board.collective_log(1), board.phase_histograms(1)) == ((), {})


def test_on_change_is_called_while_the_phase_before_still_runs(board: Board, writer: SlotWriter) -> None:
    """With the innermost phase that runs and the one that runs then, also if that had begun before."""
    told: list[tuple[Phase | None, Phase | None, Phase | None]] = []

    def change(ended: Phase | None, begun: Phase | None) -> None:
        told.append((ended, begun, seen(board).phase))

    writer.on_change = change
    writer.replace(Phase.data)
    writer.enter(Phase.score)
    writer.enter_callback("Upload.on_log")
    writer.enter(Phase.generate)
    writer.leave(Phase.callback)
    writer.leave(Phase.reward)
    writer.leave(Phase.score)
    writer.leave(Phase.data)
    assert told == [
        (None, Phase.data, None),
        (Phase.data, Phase.score, Phase.data),
        (Phase.score, Phase.callback, Phase.score),
        (Phase.callback, Phase.generate, Phase.callback),
        (Phase.generate, Phase.score, Phase.generate),
        (Phase.score, Phase.data, Phase.score),
        (Phase.data, None, Phase.data),
    ]


def test_on_enter_is_called_after_the_phase_is_on_the_board(board: Board, writer: SlotWriter) -> None:
    """`enter` and `replace` call it; `leave` does not."""
    told: list[tuple[Phase, Phase | None]] = []
    writer.on_enter = lambda phase: told.append((phase, seen(board).phase))
    writer.replace(Phase.data)
    writer.enter(Phase.generate)
    writer.leave(Phase.generate)
    assert told == [(Phase.data, Phase.data), (Phase.generate, Phase.generate)]


def test_on_enter_that_raises_leaves_the_phase_open(board: Board, writer: SlotWriter) -> None:
    """An injected fault happens in the requested phase; the slot stays readable."""

    def fault(phase: Phase) -> None:
        raise RuntimeError("planted")

    writer.on_enter = fault
    with pytest.raises(RuntimeError, match="planted"):
        writer.enter(Phase.reward)
    assert seen(board).phase is Phase.reward


def test_a_truncated_file_does_not_have_its_full_size(tmp_path: Path) -> None:
    """Access beyond its end would raise SIGBUS; a file that was renamed has its full size."""
    path = tmp_path / "board.mmap"
    board = Board.create(path, 2)
    assert board.has_full_size
    path.rename(tmp_path / "elsewhere")
    assert board.has_full_size
    os.truncate(tmp_path / "elsewhere", HEADER_BYTES + SLOT_BYTES)
    assert not board.has_full_size


def test_a_full_disk_is_reported_before_the_file_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole would raise SIGBUS in the supervisor later; the descriptor is closed."""
    path = tmp_path / "board.mmap"
    opened: list[int] = []

    def full(descriptor: int, offset: int, length: int) -> None:
        opened.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunDirectoryError, match=rf"no space for the board at {path}: No space left"):
        Board.create(path, 2)
    assert not path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_every_byte_of_a_new_board_is_allocated(tmp_path: Path) -> None:
    """The file is as long as header, slots, callback tables, exchange areas and memory areas."""
    path = tmp_path / "board.mmap"
    Board.create(path, 3)
    told = path.stat()
    assert told.st_size == HEADER_BYTES + 3 * (
        SLOT_BYTES + CALLBACKS_BYTES + EXCHANGE_BYTES + MEMORY_AREA_BYTES
    )
    assert told.st_blocks * 512 >= told.st_size


def test_a_flag_of_a_truncated_board_is_not_written(tmp_path: Path) -> None:
    """A write beyond the end of the file would end the supervisor by SIGBUS."""
    board = Board.create(tmp_path / "board.mmap", 1)
    os.truncate(tmp_path / "board.mmap", 0)
    board.announce_end(True)
    board.announce_short_memory(True)
    os.truncate(tmp_path / "board.mmap", 1 << 24)
    assert not board.ends_ranks
    assert not board.memory_is_short
