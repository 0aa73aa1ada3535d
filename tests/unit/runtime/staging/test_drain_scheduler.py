"""Which snapshot is made durable when, and what becomes of a run whose disk does not take it.

The process is a fake that answers when it is polled, by the drainer's own code where a test does not say otherwise;
staging and disk are real, the clock is turned by hand.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slots import fill, snapshot

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.drain import handle_request
from grpo_run.runtime.staging.drain_messages import DrainFailed, DrainProgress, DrainRequest
from grpo_run.runtime.staging.drain_policy import next_to_drain
from grpo_run.runtime.staging.drain_scheduler import (
    DURABLE_SECONDS,
    POLL_SECONDS,
    RETRY_SECONDS,
    STALL_SECONDS,
    DrainScheduler,
)
from grpo_run.runtime.staging.slot import StagedSnapshot, StagingSlot

Answers = Callable[[DrainRequest], list[Any]]
FULL = DrainFailed(slot=0, step=5, reason="No space left on device", full=True)
DIES = EOFError()
"""An answer that is the end of the connection."""


class World:
    """A run's staging and disk, its drains, and everything that they do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.out = folder / "out"
        self.staging = StagingArea(folder / "memory")
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.warnings: list[str] = []
        self.requests: list[DrainRequest] = []
        self.processes: list[SimpleNamespace] = []
        self.answers: Answers = self.really
        self.refuses_to_start: OSError | None = None
        self._queue: list[Any] = []
        context = SimpleNamespace(Pipe=self._pipe, Process=self._process)
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
        self.drains = self.begin()

    def begin(self) -> DrainScheduler:
        """A supervisor takes the run up."""
        return DrainScheduler(
            self.staging,
            write=lambda name, **fields: self.events.append((name, fields)),
            warn=self.warnings.append,
            preloaded=False,
            clock=lambda: self.now,
        )

    def really(self, request: DrainRequest) -> list[Any]:
        """Do what the drainer does."""
        return [handle_request(self.staging, request, lambda written: None)]

    def full(self, request: DrainRequest) -> list[Any]:
        """Do it in memory; the disk is full."""
        return self.really(request) if request.restore is not None else [FULL]

    def hangs(self, request: DrainRequest) -> list[Any]:
        """Do it in memory; the disk does not answer."""
        return self.really(request) if request.restore is not None else []

    def look(self, seconds: float = POLL_SECONDS) -> None:
        """Time passes, and the supervisor looks."""
        self.now += seconds
        self.drains.poll()

    def take(self, index: int, step: int, **changes: Any) -> StagedSnapshot:
        """A rank has taken a snapshot."""
        return fill(self.staging.slots[index], snapshot(self.out, step, **changes))

    @property
    def slots(self) -> list[int]:
        """What was asked for, in its order."""
        return [request.slot for request in self.requests]

    @property
    def durable(self) -> list[str]:
        """Checkpoints on disk."""
        return sorted(os.listdir(self.out)) if self.out.exists() else []

    @property
    def trouble(self) -> bool:
        """Ranks are told that nobody should wait for the disk."""
        return StagingArea(self.staging.path).troubled

    def named(self, name: str) -> list[dict[str, Any]]:
        """Events of that name."""
        return [fields for event, fields in self.events if event == name]

    # as much of multiprocessing as is used

    def _pipe(self) -> tuple[SimpleNamespace, nullcontext[None]]:
        self._queue = []
        mine = SimpleNamespace(send=self._send, poll=self._poll, recv=self._recv, close=lambda: None)
        return mine, nullcontext()

    def _process(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> SimpleNamespace:
        assert args[0] == str(self.staging.path)
        process = SimpleNamespace(started=False, alive=True, killed=False, stubborn=False)

        def start() -> None:
            self._start()
            process.started = True

        process.start = start
        process.is_alive = lambda: process.alive

        def join(seconds: float) -> None:
            assert process.started, "can only join a started process"
            process.alive = process.alive and process.stubborn

        def kill() -> None:
            process.alive, process.killed = False, True

        process.join, process.kill = join, kill
        self.processes.append(process)
        return process

    def _start(self) -> None:
        if self.refuses_to_start is not None:
            raise self.refuses_to_start

    def _send(self, request: DrainRequest) -> None:
        self.requests.append(request)
        self._queue += self.answers(request)

    def _poll(self, seconds: float) -> bool:
        if not self._queue:
            self.now += seconds
        return bool(self._queue)

    def _recv(self) -> Any:
        entry = self._queue.pop(0)
        if isinstance(entry, BaseException):
            self.processes[-1].alive = False
            raise entry
        return entry

    def say(self, entry: Any) -> None:
        """The drainer says something."""
        self._queue.append(entry)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has just begun."""
    return World(tmp_path, monkeypatch)


# ---- what is next, as a function ----


def entries(
    *flags: tuple[bool, bool],
) -> tuple[list[tuple[StagedSnapshot, StagingSlot]], Callable[[StagedSnapshot, StagingSlot], bool]]:
    """Snapshots newest first, of (scheduled, done); and what tells those that are done."""
    found = [
        (snapshot(Path("/out"), 100 - index, scheduled=scheduled), StagingSlot(index, Path(f"/slot{index}")))
        for index, (scheduled, _) in enumerate(flags)
    ]
    return found, lambda staged, slot: flags[slot.index][1]


FLAGS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3)


@given(flags=FLAGS, newest_first=st.booleans(), old=st.booleans())
def test_what_is_done_is_never_next(flags: list[tuple[bool, bool]], newest_first: bool, old: bool) -> None:
    """And what the script asked for is as long as there is any; a snapshot of ours only when it is the newest."""
    snapshots, done = entries(*flags)
    due = next_to_drain(snapshots, done=done, newest_first=newest_first, overdue=old)
    wanted = [entry for entry in snapshots if entry[0].scheduled and not done(*entry)]
    if due is None:
        assert not wanted
        if newest_first or old:
            assert not snapshots or done(*snapshots[0])
        return
    assert not done(*due)
    if newest_first and not done(*snapshots[0]):
        assert due == snapshots[0]
    elif wanted:
        assert due == wanted[-1]
    else:
        assert due == snapshots[0]


# ---- while training ----


def test_without_snapshots_no_process_is_started(world: World) -> None:
    """It would be one more thing to go wrong."""
    for _ in range(5):
        world.look()
    assert world.processes == []


def test_what_the_script_asked_for_is_made_durable_oldest_first(world: World) -> None:
    """As it would have been written; by one process, and each is told."""
    world.take(0, 10)
    world.take(1, 5)
    world.take(2, 12, scheduled=False)
    for _ in range(6):
        world.look()
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-10", "checkpoint-5"]
    assert len(world.processes) == 1
    told = world.named("checkpoint_published")
    assert [(fields["step"], fields["durable"], fields["verified"]) for fields in told] == [
        (5, True, True),
        (10, True, True),
    ]
    assert told[0]["path"] == str(world.out / "checkpoint-5")
    assert world.warnings == []
    assert not world.trouble


def test_a_snapshot_of_ours_is_made_durable_when_nothing_young_is(world: World) -> None:
    """Memory does not outlive the machine; the newest, and then none for as long again."""
    world.take(0, 5, scheduled=False)
    world.take(1, 6, scheduled=False)
    world.look(DURABLE_SECONDS - 1.0)
    assert world.requests == []
    world.look(1.0)
    world.look()
    assert world.durable == ["checkpoint-6"]
    world.take(0, 7, scheduled=False)
    world.look(DURABLE_SECONDS - 1.0)
    assert world.durable == ["checkpoint-6"]
    world.look(1.0)
    world.look()
    assert world.durable == ["checkpoint-7"], "the superseded one is gone"


def test_one_request_is_under_way_at_a_time(world: World) -> None:
    """And a look returns at once."""
    world.answers = lambda request: []
    world.take(0, 5)
    world.take(1, 6)
    before = world.now
    for _ in range(5):
        world.drains.poll()
    assert world.now == before
    world.look()
    assert world.slots == [0]
    assert world.drains.busy


def test_looks_are_not_more_frequent_than_worth_it(world: World) -> None:
    """The supervisor looks ten times a second; the slots need not be read so often."""
    world.look()
    world.take(0, 5)
    world.look(POLL_SECONDS / 2)
    assert world.requests == []
    world.look(POLL_SECONDS / 2)
    assert world.slots == [0]


# ---- a disk that does not take it ----


def test_a_full_disk_is_one_alert_and_tried_again(world: World) -> None:
    """Ranks are told not to wait; when there is room again it is written and they are told that too."""
    frees = iter(range(10, 1000))
    world.answers = lambda request: [
        DrainFailed(slot=0, step=5, reason=f"{next(frees)} MiB may be taken", full=True)
    ]
    world.take(0, 5)
    world.look()
    world.look()
    assert world.trouble
    assert len(world.warnings) == 1
    assert "full" in world.warnings[0]
    assert f"{world.out}/checkpoint-5" in world.warnings[0]
    assert [(fields["cause"], fields["step"]) for fields in world.named("checkpoint_failed")] == [
        ("disk_full", 5)
    ]
    for _ in range(3):
        world.look(RETRY_SECONDS - 1.0)
        world.look(1.0)
        world.look()
    assert 3 <= len(world.requests) <= 5
    assert len(world.warnings) == 1, "once for each trouble, whatever the numbers are"
    world.answers = world.really
    world.look(RETRY_SECONDS)
    world.look()
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble
    assert len(world.warnings) == 2
    assert "again" in world.warnings[1]


def test_a_failure_is_not_tried_again_at_once(world: World) -> None:
    """Nor is anything else meanwhile: it is the same disk."""
    world.answers = lambda request: [FULL]
    world.take(0, 5)
    world.look()
    world.look()
    world.take(1, 6)
    world.look(RETRY_SECONDS - 2 * POLL_SECONDS)
    assert len(world.requests) == 1
    world.look(3 * POLL_SECONDS)
    assert len(world.requests) == 2


def test_trouble_of_another_kind_is_another_alert(world: World) -> None:
    """A person does something else about it."""
    world.answers = lambda request: [FULL]
    world.take(0, 5)
    world.look()
    world.look()
    world.answers = lambda request: [DrainFailed(slot=0, step=5, reason="Read-only file system", full=False)]
    world.look(RETRY_SECONDS)
    world.look()
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["disk_full", "unknown"]
    assert "Read-only" in world.warnings[-1]


def test_a_stall_is_said_once_and_waited_out(world: World) -> None:
    """Training goes on; the process is let be, and when it moves again nothing was lost."""
    world.answers = lambda request: []
    world.take(0, 5)
    world.look()
    world.look(STALL_SECONDS)
    assert world.warnings == []
    for _ in range(5):
        world.look(STALL_SECONDS)
    assert len(world.warnings) == 1
    assert "has made no progress" in world.warnings[0]
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["checkpoint_stall"]
    assert world.trouble
    assert not world.processes[0].killed
    assert len(world.requests) == 1
    world.say(world.really(world.requests[0])[0])
    world.look()
    assert not world.trouble
    assert world.durable == ["checkpoint-5"]


def test_a_slow_disk_is_no_stall(world: World) -> None:
    """As long as something is written."""
    world.answers = lambda request: []
    world.take(0, 5)
    world.look()
    for written in range(10):
        world.say(DrainProgress(written_bytes=written))
        world.look(STALL_SECONDS - 1.0)
    assert world.warnings == []
    assert not world.trouble


@pytest.mark.parametrize("end", [DIES, ConnectionResetError(104, "Connection reset by peer")])
def test_a_drainer_that_dies_is_replaced(world: World, end: BaseException) -> None:
    """Said, as it may be the kernel that kills it each time; and the work is done by the next."""
    world.answers = lambda request: [end]
    world.take(0, 5)
    world.look()
    world.look()
    assert not world.drains.busy
    assert world.trouble, "nobody may wait for it"
    assert "died" in world.warnings[0]
    world.answers = world.really
    world.look(RETRY_SECONDS)
    world.look()
    assert len(world.processes) == 2
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble


def test_a_drainer_that_died_in_idleness_is_replaced_unnoticed(world: World) -> None:
    """Nothing was lost by it."""
    world.take(0, 5)
    world.look()
    world.look()
    world.processes[0].alive = False
    world.take(1, 6)
    world.look()
    world.look()
    assert len(world.processes) == 2
    assert world.durable == ["checkpoint-5", "checkpoint-6"]
    assert world.warnings == []


def test_a_process_that_cannot_be_started_does_not_end_the_supervisor(world: World) -> None:
    """No memory for a fork, or the forkserver is gone: an alert, and another try later."""
    world.refuses_to_start = OSError(12, "Cannot allocate memory")
    world.take(0, 5)
    world.look()
    assert "Cannot allocate memory" in world.warnings[0]
    assert world.trouble
    world.refuses_to_start = None
    world.look(RETRY_SECONDS)
    world.look()
    assert world.durable == ["checkpoint-5"]


def test_a_slot_that_a_rank_took_first_is_no_trouble(world: World) -> None:
    """The disk has done nothing wrong."""
    world.answers = lambda request: [DrainFailed(slot=0, step=None, reason="the slot is empty", full=False)]
    world.take(0, 5)
    world.look()
    world.look()
    assert world.warnings == []
    assert not world.trouble


def test_a_broken_snapshot_does_not_stand_in_the_way(world: World) -> None:
    """It is given up, with an alert, and the next is written; the disk is not blamed."""
    world.take(0, 5)
    world.take(1, 6)
    world.staging.slots[0].index_path(0).write_text("{")
    for _ in range(6):
        world.look()
    assert world.durable == ["checkpoint-6"]
    assert world.slots == [0, 1]
    assert not world.trouble
    assert len(world.warnings) == 1
    assert "cannot be read" in world.warnings[0]
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["checkpoint_corrupt"]
    world.take(0, 7)
    world.look()
    world.look()
    assert "checkpoint-7" in world.durable, "what is written to the slot later is another snapshot"


def test_an_earlier_supervisors_trouble_is_forgotten(world: World) -> None:
    """The next one finds out for itself."""
    world.staging.set_trouble("the disk is full")
    world.begin()
    assert not world.trouble


# ---- before a restart, and at the end ----


def test_before_a_restart_the_newest_is_made_durable_first(world: World) -> None:
    """Whoever wanted it; the rest that the script asked for, and no more, while training goes on."""
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    world.take(2, 7, scheduled=False)
    world.drains.flush(restore=True)
    assert world.slots == [1]
    assert world.durable == ["checkpoint-9"]
    world.look()
    world.look()
    world.look()
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-5", "checkpoint-9"]
    assert not world.staging.restore.exists()


def test_a_request_under_way_is_waited_for(world: World) -> None:
    """As long as it moves."""
    said = iter([[DrainProgress(written_bytes=1)]])
    world.answers = lambda request: next(said, [])
    world.take(0, 5)
    world.look()
    world.answers = world.really
    request = world.requests[0]
    world.say(DrainProgress(written_bytes=2))
    world.say(world.really(request)[0])
    world.drains.flush(restore=True)
    assert world.slots == [0]
    assert world.durable == ["checkpoint-5"]


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_what_the_disk_does_not_take_is_restored_in_memory(world: World, disk: str) -> None:
    """The newest: the next attempt resumes from there. Only for a restart."""
    world.answers = getattr(world, disk)
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    before = world.now
    world.drains.flush(restore=True)
    path = world.staging.restore / "checkpoint-9"
    verify_digests(path, read_manifest(path).files)
    assert world.durable == []
    assert world.trouble
    assert [fields["durable"] for fields in world.named("checkpoint_published")] == [False]
    assert world.now - before < 4 * STALL_SECONDS
    assert world.drains.busy is False


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_at_the_end_nothing_is_restored(world: World, disk: str) -> None:
    """Nobody would load it; it stays where it is."""
    world.answers = getattr(world, disk)
    world.take(1, 9)
    world.drains.flush(restore=False)
    assert not world.staging.restore.exists()
    world.drains.close()
    assert world.staging.snapshots()
    assert str(world.staging.path) in world.warnings[-1]


def test_a_process_that_hangs_is_killed(world: World) -> None:
    """And another one writes to memory."""
    world.answers = world.hangs
    world.take(0, 9)
    world.look()
    world.processes[0].stubborn = True
    world.drains.flush(restore=True)
    assert world.processes[0].killed
    assert len(world.processes) >= 2
    assert (world.staging.restore / "checkpoint-9").is_dir()


def test_what_is_restored_already_is_not_restored_again(world: World) -> None:
    """Another failure before the next snapshot."""
    world.answers = world.full
    world.take(0, 9)
    world.drains.flush(restore=True)
    asked = len(world.requests)
    world.drains.flush(restore=True)
    assert len(world.requests) == asked


@pytest.mark.parametrize("later", [{"attempt": 1}, {"ordinal": 2}])
def test_another_snapshot_of_the_same_step_is_restored_anew(world: World, later: dict[str, int]) -> None:
    """A later attempt's or call's: the one in memory has its name and is not it."""
    world.answers = world.full
    world.take(0, 9)
    world.drains.flush(restore=True)
    staged = world.take(1, 9, **later)
    world.drains.flush(restore=True)
    manifest = read_manifest(world.staging.restore / "checkpoint-9")
    assert manifest.train_call == staged.train_call
    assert [request.slot for request in world.requests if request.restore] == [0, 1]


def test_an_older_restored_one_makes_room(world: World) -> None:
    """Memory for one is enough."""
    world.answers = world.full
    world.take(0, 8)
    world.drains.flush(restore=True)
    world.take(1, 9)
    world.drains.flush(restore=True)
    assert os.listdir(world.staging.restore) == ["checkpoint-9"]


def test_settling_gives_up_in_the_end(world: World) -> None:
    """When neither disk nor memory takes it; the restart goes on without."""
    world.answers = lambda request: [FULL]
    world.take(0, 5)
    world.take(1, 9)
    world.drains.flush(restore=True)
    assert len(world.requests) <= 4
    assert not world.drains.busy


def test_a_broken_newest_leaves_the_others(world: World) -> None:
    """The next one may be whole."""
    world.take(0, 5)
    world.take(1, 9)
    world.staging.slots[1].buffer_path(0).unlink()
    world.drains.flush(restore=True)
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble


def test_settling_waits_as_long_as_bytes_move(world: World) -> None:
    """However slow the disk is: to give up would lose what it has taken so far."""
    world.answers = lambda request: []
    world.take(0, 9)
    polls = [0]
    poll = world._poll

    def slow(seconds: float) -> bool:
        polls[0] += 1
        world.now += STALL_SECONDS - 1.0
        world.say(
            DrainProgress(written_bytes=polls[0]) if polls[0] < 100 else world.really(world.requests[0])[0]
        )
        return poll(seconds)

    world._poll = slow  # type: ignore[method-assign]
    world.drains.flush(restore=True)
    assert world.durable == ["checkpoint-9"]
    assert world.warnings == []


def test_a_stall_is_said_with_its_length(world: World) -> None:
    """Seconds without a byte."""
    world.answers = world.hangs
    world.take(0, 9)
    world.drains.flush(restore=False)
    assert f"has made no progress for {STALL_SECONDS:.0f} s" in world.warnings[0]


def test_a_connection_that_is_gone_is_a_lost_request(world: World) -> None:
    """And no end of the supervisor."""
    world.answers = lambda request: []
    world.take(0, 9)
    world.look()
    world.drains.worker.stop(0.0)
    world.look()
    assert not world.drains.busy
    assert "drain worker died" in world.warnings[0]


# ---- what others have published ----


def test_a_snapshot_of_ours_below_a_durable_checkpoint_is_not_drained(world: World) -> None:
    """A newer one is there to resume from; and nothing keeps the memory."""
    world.take(0, 5, scheduled=False)
    world.drains.record_published(1, 6)
    world.look(DURABLE_SECONDS)
    world.drains.flush(restore=True)
    world.drains.flush(restore=False)
    assert world.requests == []
    world.drains.close()
    assert not world.staging.path.exists()


@pytest.mark.parametrize(
    ("call", "step", "later"),
    [(1, 4, 0.0), (2, 9, 0.0), (1, 9, -10.0)],
    ids=["older", "other call", "went back"],
)
def test_another_durable_checkpoint_supersedes_nothing(
    world: World, call: int, step: int, later: float
) -> None:
    """An earlier step's, another call's, or one from before the run went back."""
    staged = world.take(0, 5, scheduled=False)
    world.drains.record_published(call, step, taken_at=staged.staged_at + later)
    world.drains.flush(restore=True)
    assert world.durable == ["checkpoint-5"]


def test_what_the_script_asked_for_is_drained_whatever_is_newer(world: World) -> None:
    """It is the script's to have."""
    world.take(0, 5)
    world.drains.record_published(1, 9)
    world.look()
    world.look()
    assert world.durable == ["checkpoint-5"]


# ---- the end ----


def test_the_memory_is_given_back_when_all_is_durable(world: World) -> None:
    """Superseded snapshots do not count."""
    world.take(0, 5)
    world.take(1, 4, scheduled=False)
    world.drains.flush(restore=False)
    world.drains.close()
    assert not world.staging.path.exists()
    assert world.warnings == []
    assert not world.processes[0].alive


@pytest.mark.parametrize("scheduled", [True, False])
def test_what_counts_and_is_not_durable_keeps_the_memory(world: World, scheduled: bool) -> None:
    """The newest, whoever wanted it: the run may be gone on with."""
    world.take(0, 9, scheduled=scheduled)
    world.drains.close()
    assert [staged.step for staged, _ in world.staging.snapshots()] == [9]
    assert world.warnings == [
        f"snapshots that could not be written to disk are kept in memory, in {world.staging.path}"
    ]


def test_what_the_script_asked_for_keeps_the_memory(world: World) -> None:
    """Also when a newer one is durable."""
    world.take(0, 5)
    world.take(1, 9)
    world.staging.slots[1].mark_drained()
    world.drains.close()
    assert world.staging.snapshots()


def test_a_broken_snapshot_does_not_keep_the_memory(world: World) -> None:
    """Nothing could ever be made of it."""
    world.take(0, 9)
    world.staging.slots[0].index_path(0).write_text("{")
    world.drains.flush(restore=False)
    world.drains.close()
    assert not world.staging.path.exists()


def test_closing_what_never_began_does_no_harm(world: World) -> None:
    """A run that ended before its first snapshot."""
    world.drains.close()
    assert not world.staging.path.exists()
    assert world.warnings == []
