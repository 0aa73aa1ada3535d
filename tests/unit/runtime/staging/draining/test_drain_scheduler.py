"""When snapshots are drained, and what happens if the disk is full, stuck or failing.

The worker process is a fake that replies when it is polled, with the worker's own code unless a test replaces
it. The staging area and the disk are real; the tests advance the clock.
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
from support.slots import fill, snapshot

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.draining.drain import handle_request
from grpo_run.runtime.staging.draining.drain_messages import DrainFailed, DrainProgress, DrainRequest
from grpo_run.runtime.staging.draining.drain_requests import RETRY_SECONDS, STALL_SECONDS
from grpo_run.runtime.staging.draining.drain_scheduler import (
    DURABLE_SECONDS,
    HOLD_SECONDS,
    POLL_SECONDS,
    DrainScheduler,
)
from grpo_run.runtime.staging.slot import StagedSnapshot

Replies = Callable[[DrainRequest], list[Any]]
FULL = DrainFailed(slot=0, step=5, reason="No space left on device", full=True)
DIES = EOFError()
"""A reply that is the end of the connection."""


class World:
    """A run with a staging area, a disk and a scheduler; records what the scheduler does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.out = folder / "out"
        self.staging = StagingArea(folder / "memory")
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.warnings: list[str] = []
        self.requests: list[DrainRequest] = []
        self.processes: list[SimpleNamespace] = []
        self.replies: Replies = self.drain
        self.refuses_to_start: OSError | None = None
        self._queue: list[Any] = []
        context = SimpleNamespace(Pipe=self._pipe, Process=self._process)
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
        self.scheduler = self.begin()

    def begin(self) -> DrainScheduler:
        """Create the scheduler of a new supervisor."""
        return DrainScheduler(
            self.staging,
            write=lambda name, **fields: self.events.append((name, fields)),
            warn=self.warnings.append,
            preloaded=False,
            clock=lambda: self.now,
        )

    def drain(self, request: DrainRequest) -> list[Any]:
        """Reply as the drain worker does."""
        return [handle_request(self.staging, request, lambda written: None)]

    def full(self, request: DrainRequest) -> list[Any]:
        """Reply that the disk is full; restore in memory."""
        return self.drain(request) if request.restore is not None else [FULL]

    def hangs(self, request: DrainRequest) -> list[Any]:
        """Send no reply; restore in memory."""
        return self.drain(request) if request.restore is not None else []

    def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Advance the clock and poll the scheduler."""
        self.now += seconds
        self.scheduler.poll()

    def take(self, index: int, step: int, **changes: Any) -> StagedSnapshot:
        """Write a snapshot as a rank does."""
        recorded = bool(changes.pop("recorded", False))
        return fill(self.staging.slots[index], snapshot(self.out, step, **changes), recorded=recorded)

    @property
    def slots(self) -> list[int]:
        """Slots of the requests, in order."""
        return [request.slot for request in self.requests]

    @property
    def durable(self) -> list[str]:
        """Names of the checkpoints and snapshots on disk."""
        snapshots = (path.name for path in self.out.glob("_grpo_run/*/*/*"))
        own = os.listdir(self.out) if self.out.exists() else []
        return sorted({*own, *snapshots} - {"_grpo_run"})

    @property
    def trouble(self) -> bool:
        """Ranks see that the disk is in trouble."""
        return StagingArea(self.staging.path).troubled

    def named(self, name: str) -> list[dict[str, Any]]:
        """Fields of the events with this name."""
        return [fields for event, fields in self.events if event == name]

    # the part of multiprocessing that the scheduler uses

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
        self._queue += self.replies(request)

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

    def send_reply(self, entry: Any) -> None:
        """Queue a reply of the drain worker."""
        self._queue.append(entry)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has just started."""
    return World(tmp_path, monkeypatch)


# ---- while training ----


def test_without_snapshots_no_worker_is_started(world: World) -> None:
    """Repeated polls do not start one."""
    for _ in range(5):
        world.poll()
    assert world.processes == []


def test_scheduled_snapshots_are_drained_oldest_first(world: World) -> None:
    """One worker drains them, with one event per checkpoint."""
    world.take(0, 10)
    world.take(1, 5)
    world.take(2, 12, scheduled=False)
    for _ in range(6):
        world.poll()
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-10", "checkpoint-5"]
    assert len(world.processes) == 1
    published = world.named("checkpoint_published")
    assert [(fields["step"], fields["durable"], fields["verified"]) for fields in published] == [
        (5, True, True),
        (10, True, True),
    ]
    assert published[0]["path"] == str(world.out / "checkpoint-5")
    assert world.warnings == []
    assert not world.trouble


def test_the_newest_recovery_snapshot_is_drained_when_the_last_checkpoint_is_too_old(world: World) -> None:
    """Memory does not survive the machine."""
    world.take(0, 5, scheduled=False)
    world.take(1, 6, scheduled=False)
    world.poll(DURABLE_SECONDS - 1.0)
    assert world.requests == []
    world.poll(1.0)
    world.poll()
    assert world.durable == ["snapshot-6"]
    world.take(0, 7, scheduled=False)
    world.poll(DURABLE_SECONDS - 1.0)
    assert world.durable == ["snapshot-6"]
    world.poll(1.0)
    world.poll()
    assert world.durable == ["snapshot-7"], "the superseded one is deleted"


def test_one_request_is_in_progress_at_a_time(world: World) -> None:
    """Polling does not block."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.take(1, 6)
    before = world.now
    for _ in range(5):
        world.scheduler.poll()
    assert world.now == before
    world.poll()
    assert world.slots == [0]
    assert world.scheduler.busy


def test_the_slots_are_read_at_most_once_per_poll_interval(world: World) -> None:
    """The supervisor polls more often."""
    world.poll()
    world.take(0, 5)
    world.poll(POLL_SECONDS / 2)
    assert world.requests == []
    world.poll(POLL_SECONDS / 2)
    assert world.slots == [0]


# ---- a full, stuck or failing disk ----


def test_a_full_disk_raises_one_alert_and_is_retried(world: World) -> None:
    """Ranks do not wait for the disk until a checkpoint is written again."""
    frees = iter(range(10, 1000))
    world.replies = lambda request: [
        DrainFailed(slot=0, step=5, reason=f"{next(frees)} MiB may be taken", full=True)
    ]
    world.take(0, 5)
    world.poll()
    world.poll()
    assert world.trouble
    assert len(world.warnings) == 1
    assert "full" in world.warnings[0]
    assert f"{world.out}/checkpoint-5" in world.warnings[0]
    assert [(fields["cause"], fields["step"]) for fields in world.named("checkpoint_failed")] == [
        ("disk_full", 5)
    ]
    for _ in range(3):
        world.poll(RETRY_SECONDS - 1.0)
        world.poll(1.0)
        world.poll()
    assert 3 <= len(world.requests) <= 5
    assert len(world.warnings) == 1, "one alert per cause, even if the reason changes"
    world.replies = world.drain
    world.poll(RETRY_SECONDS)
    world.poll()
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble
    assert len(world.warnings) == 2
    assert "again" in world.warnings[1]


def test_a_failed_drain_is_retried_after_a_wait(world: World) -> None:
    """Other snapshots wait too, because they use the same disk."""
    world.replies = lambda request: [FULL]
    world.take(0, 5)
    world.poll()
    world.poll()
    world.take(1, 6)
    world.poll(RETRY_SECONDS - 2 * POLL_SECONDS)
    assert len(world.requests) == 1
    world.poll(3 * POLL_SECONDS)
    assert len(world.requests) == 2


def test_another_cause_raises_another_alert(world: World) -> None:
    """The user must act differently."""
    world.replies = lambda request: [FULL]
    world.take(0, 5)
    world.poll()
    world.poll()
    world.replies = lambda request: [DrainFailed(slot=0, step=5, reason="Read-only file system", full=False)]
    world.poll(RETRY_SECONDS)
    world.poll()
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["disk_full", "unknown"]
    assert "Read-only" in world.warnings[-1]


def test_a_stall_raises_one_alert_and_the_request_continues(world: World) -> None:
    """Training continues, the worker is not killed, and the checkpoint is written in the end."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.poll()
    world.poll(STALL_SECONDS)
    assert world.warnings == []
    for _ in range(5):
        world.poll(STALL_SECONDS)
    assert len(world.warnings) == 1
    assert "has made no progress" in world.warnings[0]
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["checkpoint_stall"]
    assert world.trouble
    assert not world.processes[0].killed
    assert len(world.requests) == 1
    world.send_reply(world.drain(world.requests[0])[0])
    world.poll()
    assert not world.trouble
    assert world.durable == ["checkpoint-5"]


def test_a_slow_disk_is_not_a_stall(world: World) -> None:
    """The disk writes bytes all the time."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.poll()
    for written in range(10):
        world.send_reply(DrainProgress(written_bytes=written))
        world.poll(STALL_SECONDS - 1.0)
    assert world.warnings == []
    assert not world.trouble


@pytest.mark.parametrize("end", [DIES, ConnectionResetError(104, "Connection reset by peer")])
def test_a_worker_that_dies_is_replaced(world: World, end: BaseException) -> None:
    """An alert is raised, because the cause may persist."""
    world.replies = lambda request: [end]
    world.take(0, 5)
    world.poll()
    world.poll()
    assert not world.scheduler.busy
    assert world.trouble, "ranks must not wait for the disk"
    assert "died" in world.warnings[0]
    world.replies = world.drain
    world.poll(RETRY_SECONDS)
    world.poll()
    assert len(world.processes) == 2
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble


def test_an_idle_worker_that_dies_is_replaced_without_an_alert(world: World) -> None:
    """No work was lost."""
    world.take(0, 5)
    world.poll()
    world.poll()
    world.processes[0].alive = False
    world.take(1, 6)
    world.poll()
    world.poll()
    assert len(world.processes) == 2
    assert world.durable == ["checkpoint-5", "checkpoint-6"]
    assert world.warnings == []


def test_a_worker_that_cannot_be_started_raises_an_alert(world: World) -> None:
    """The start is retried later."""
    world.refuses_to_start = OSError(12, "Cannot allocate memory")
    world.take(0, 5)
    world.poll()
    assert "Cannot allocate memory" in world.warnings[0]
    assert world.trouble
    world.refuses_to_start = None
    world.poll(RETRY_SECONDS)
    world.poll()
    assert world.durable == ["checkpoint-5"]


def test_a_slot_reused_by_a_rank_raises_no_alert(world: World) -> None:
    """The disk is not at fault."""
    world.replies = lambda request: [DrainFailed(slot=0, step=None, reason="the slot is empty", full=False)]
    world.take(0, 5)
    world.poll()
    world.poll()
    assert world.warnings == []
    assert not world.trouble


def test_a_broken_snapshot_is_skipped(world: World) -> None:
    """With an alert that does not blame the disk; a new snapshot in its slot is drained."""
    world.take(0, 5)
    world.take(1, 6)
    world.staging.slots[0].index_path(0).write_text("{")
    for _ in range(6):
        world.poll()
    assert world.durable == ["checkpoint-6"]
    assert world.slots == [0, 1]
    assert not world.trouble
    assert len(world.warnings) == 1
    assert "cannot be read" in world.warnings[0]
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["checkpoint_corrupt"]
    world.take(0, 7)
    world.poll()
    world.poll()
    assert "checkpoint-7" in world.durable, "a later snapshot in the same slot is drained"


def test_trouble_of_an_earlier_supervisor_is_cleared(world: World) -> None:
    """The new one tests the disk itself."""
    world.staging.set_trouble("the disk is full")
    world.begin()
    assert not world.trouble


# ---- before a restart, and at the end ----


def test_before_a_restart_the_newest_snapshot_is_drained_first(world: World) -> None:
    """Even if it is not scheduled; scheduled ones follow while training continues."""
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    world.take(2, 7, scheduled=False)
    world.scheduler.flush(restore=True)
    assert world.slots == [1]
    assert world.durable == ["snapshot-9"]
    world.poll()
    world.poll()
    world.poll()
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-5", "snapshot-9"]
    assert not world.staging.restore.exists()


def test_the_newest_snapshot_is_offered_to_an_attempt_and_drained_after_its_first_step(world: World) -> None:
    """Ranks start at once; nothing is written to disk while they load."""
    world.take(0, 5, layout="ddp", recorded=True)
    world.take(1, 9, scheduled=False, layout="ddp", recorded=True)
    offered = world.scheduler.prepare_attempt(1)
    assert offered is not None
    assert (offered.slot, offered.train_call, offered.order[2]) == (1, 1, 9)
    world.now += 10
    world.scheduler.poll(ranks_have_loaded=False)
    assert world.requests == []
    for _ in range(4):
        world.poll()
    assert world.durable == ["checkpoint-5", "snapshot-9"]


def test_an_attempt_that_is_to_spare_memory_loads_from_disk(world: World) -> None:
    """The newest snapshot is written first, and the memory of all that is on disk is free when the ranks start."""
    world.take(0, 5, layout="ddp", recorded=True)
    world.take(1, 9, scheduled=False, layout="ddp", recorded=True)
    assert world.scheduler.prepare_attempt(1, spare_memory=True) is None
    assert world.durable == ["snapshot-9"]
    assert [staged.step for staged, _ in world.staging.snapshots()] == [5]
    assert not any(path.stat().st_blocks for path in world.staging.slots[1].path.glob("*.arena"))


def test_a_disk_that_fails_leaves_the_only_copy_in_memory(world: World) -> None:
    """Sparing memory is no reason to lose steps."""
    world.replies = lambda request: [FULL]
    world.take(0, 9, layout="ddp", recorded=True)
    assert world.scheduler.prepare_attempt(1, spare_memory=True) is not None
    assert [staged.step for staged, _ in world.staging.snapshots()] == [9]


def test_short_memory_lets_the_newest_snapshot_be_drained_and_freed(world: World) -> None:
    """Otherwise it stays in memory only, until half an hour has passed."""
    world.take(0, 9, scheduled=False)
    for _ in range(3):
        world.poll()
    assert world.durable == []
    assert world.scheduler.free_memory() == 0
    world.scheduler.memory_is_short = True
    for _ in range(3):
        world.poll()
    assert world.durable == ["snapshot-9"]
    assert world.scheduler.free_memory() > 0


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "per-rank"])
def test_a_snapshot_of_a_loop_is_offered_however_its_state_is_spread(world: World, layout: str) -> None:
    """Each rank of a loop loads its own files with `torch.load`."""
    world.take(0, 5, layout=layout, recorded=True, trainer_class=LOOP, world_size=2)
    assert world.scheduler.prepare_attempt(2) is not None
    assert world.requests == []


def test_drains_are_not_held_for_ever(world: World) -> None:
    """A script may prepare its data for hours before it trains."""
    world.take(0, 5, layout="ddp", recorded=True)
    world.scheduler.prepare_attempt(1)
    world.now += HOLD_SECONDS + 1
    world.scheduler.poll(ranks_have_loaded=False)
    assert world.slots == [0]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (1, {"layout": "deepspeed-zero2"}),
        (1, {"layout": "fsdp2"}),
        (2, {"layout": "fsdp2", "trainer_class": LOOP}),
        (1, {"recorded": False}),
    ],
    ids=["other ranks", "sharded", "FSDP2 of a Trainer", "a loop of other ranks", "without digests"],
)
def test_a_snapshot_that_cannot_be_loaded_from_memory_is_drained_first(
    world: World, ranks: int, changes: dict[str, Any]
) -> None:
    """As many ranks as wrote it load what each loads by itself; everything else is loaded from disk."""
    world.take(0, 5, **({"layout": "ddp", "recorded": True} | changes))
    assert world.scheduler.prepare_attempt(ranks) is None
    assert world.durable == ["checkpoint-5"]


def test_a_snapshot_is_not_offered_again_to_the_attempt_after_one_without_a_step(world: World) -> None:
    """Whatever the reason was: the next attempt loads from disk, and so do all until a step is finished."""
    world.take(0, 5, layout="ddp", recorded=True)
    assert world.scheduler.prepare_attempt(1) is not None
    for _ in range(2):
        assert world.scheduler.prepare_attempt(1) is None
        assert world.durable == ["checkpoint-5"]
    world.poll()
    assert world.scheduler.prepare_attempt(1) is not None


def test_a_damaged_snapshot_is_not_offered(world: World) -> None:
    """It is reported as lost, and the next older one is offered."""
    world.take(0, 5, layout="ddp", recorded=True)
    world.take(1, 9, layout="ddp", recorded=True)
    os.truncate(world.staging.slots[1].buffer_path(0), 1)
    offered = world.scheduler.prepare_attempt(1)
    assert offered is not None
    assert offered.slot == 0
    assert "checkpoint-9 is lost, its snapshot in memory cannot be read" in world.warnings[0]


def test_a_snapshot_on_disk_is_offered_from_memory_unless_a_later_checkpoint_was_written(
    world: World,
) -> None:
    """Its digests need not be compared again. A rank may have written a later checkpoint itself."""
    world.take(0, 5, scheduled=False, layout="ddp", recorded=True)
    world.scheduler.flush(restore=True)
    assert world.scheduler.prepare_attempt(1) is not None
    world.poll()
    world.take(1, 7, scheduled=False, layout="ddp", recorded=True)
    world.scheduler.record_published(1, 8)
    assert world.scheduler.prepare_attempt(1) is None


def test_flushing_waits_for_the_request_in_progress(world: World) -> None:
    """It is not sent again."""
    replies = iter([[DrainProgress(written_bytes=1)]])
    world.replies = lambda request: next(replies, [])
    world.take(0, 5)
    world.poll()
    world.replies = world.drain
    request = world.requests[0]
    world.send_reply(DrainProgress(written_bytes=2))
    world.send_reply(world.drain(request)[0])
    world.scheduler.flush(restore=True)
    assert world.slots == [0]
    assert world.durable == ["checkpoint-5"]


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_before_a_restart_the_newest_snapshot_is_restored_in_memory_if_the_disk_fails(
    world: World, disk: str
) -> None:
    """The next attempt resumes from it."""
    world.replies = getattr(world, disk)
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    before = world.now
    world.scheduler.flush(restore=True)
    path = world.staging.restore / "checkpoint-9"
    verify_digests(path, read_manifest(path).files)
    assert world.durable == []
    assert world.trouble
    assert [fields["durable"] for fields in world.named("checkpoint_published")] == [False]
    assert world.now - before < 4 * STALL_SECONDS
    assert world.scheduler.busy is False


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_at_the_end_nothing_is_restored_in_memory(world: World, disk: str) -> None:
    """The snapshot stays in its slot."""
    world.replies = getattr(world, disk)
    world.take(1, 9)
    world.scheduler.flush(restore=False)
    assert not world.staging.restore.exists()
    world.scheduler.close()
    assert world.staging.snapshots()
    assert str(world.staging.path) in world.warnings[-1]


def test_a_stuck_worker_is_killed_before_a_restart(world: World) -> None:
    """Another worker restores in memory."""
    world.replies = world.hangs
    world.take(0, 9)
    world.poll()
    world.processes[0].stubborn = True
    world.scheduler.flush(restore=True)
    assert world.processes[0].killed
    assert len(world.processes) >= 2
    assert (world.staging.restore / "checkpoint-9").is_dir()


def test_a_snapshot_is_restored_only_once(world: World) -> None:
    """A second failure before the next snapshot."""
    world.replies = world.full
    world.take(0, 9)
    world.scheduler.flush(restore=True)
    asked = len(world.requests)
    world.scheduler.flush(restore=True)
    assert len(world.requests) == asked


@pytest.mark.parametrize("later", [{"attempt": 1}, {"ordinal": 2}])
def test_another_snapshot_of_the_same_step_replaces_the_restored_one(
    world: World, later: dict[str, int]
) -> None:
    """It is of a later attempt or call."""
    world.replies = world.full
    world.take(0, 9)
    world.scheduler.flush(restore=True)
    staged = world.take(1, 9, **later)
    world.scheduler.flush(restore=True)
    manifest = read_manifest(world.staging.restore / "checkpoint-9")
    assert manifest.train_call == staged.train_call
    assert [request.slot for request in world.requests if request.restore] == [0, 1]


def test_an_older_restored_checkpoint_is_deleted(world: World) -> None:
    """Memory holds one at a time."""
    world.replies = world.full
    world.take(0, 8)
    world.scheduler.flush(restore=True)
    world.take(1, 9)
    world.scheduler.flush(restore=True)
    assert os.listdir(world.staging.restore) == ["checkpoint-9"]


def test_flushing_gives_up_if_disk_and_memory_fail(world: World) -> None:
    """The restart continues without the snapshot."""
    world.replies = lambda request: [FULL]
    world.take(0, 5)
    world.take(1, 9)
    world.scheduler.flush(restore=True)
    assert len(world.requests) <= 4
    assert not world.scheduler.busy


def test_if_the_newest_snapshot_is_broken_the_next_one_is_drained(world: World) -> None:
    """The disk is not reported as failing."""
    world.take(0, 5)
    world.take(1, 9)
    world.staging.slots[1].buffer_path(0).unlink()
    world.scheduler.flush(restore=True)
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble


def test_flushing_waits_while_the_disk_makes_progress(world: World) -> None:
    """Giving up would lose what is already written."""
    world.replies = lambda request: []
    world.take(0, 9)
    polls = [0]
    poll = world._poll

    def slow(seconds: float) -> bool:
        polls[0] += 1
        world.now += STALL_SECONDS - 1.0
        world.send_reply(
            DrainProgress(written_bytes=polls[0]) if polls[0] < 100 else world.drain(world.requests[0])[0]
        )
        return poll(seconds)

    world._poll = slow  # type: ignore[method-assign]
    world.scheduler.flush(restore=True)
    assert world.durable == ["checkpoint-9"]
    assert world.warnings == []


def test_a_stall_alert_states_the_time_without_progress(world: World) -> None:
    """The time is in seconds."""
    world.replies = world.hangs
    world.take(0, 9)
    world.scheduler.flush(restore=False)
    assert f"has made no progress for {STALL_SECONDS:.0f} s" in world.warnings[0]


def test_a_worker_stopped_during_a_request_loses_only_the_request(world: World) -> None:
    """The supervisor continues."""
    world.replies = lambda request: []
    world.take(0, 9)
    world.poll()
    world.scheduler.worker.stop(0.0)
    world.poll()
    assert not world.scheduler.busy
    assert "drain worker died" in world.warnings[0]


# ---- checkpoints that ranks wrote themselves ----


def test_a_recovery_snapshot_older_than_a_checkpoint_on_disk_is_not_drained(world: World) -> None:
    """The memory is freed at the end."""
    world.take(0, 5, scheduled=False)
    world.scheduler.record_published(1, 6)
    world.poll(DURABLE_SECONDS)
    world.scheduler.flush(restore=True)
    world.scheduler.flush(restore=False)
    assert world.requests == []
    world.scheduler.close()
    assert not world.staging.path.exists()


@pytest.mark.parametrize(
    ("call", "step", "later"),
    [(1, 4, 0.0), (2, 9, 0.0), (1, 9, -10.0)],
    ids=["older", "other call", "went back"],
)
def test_an_unrelated_checkpoint_on_disk_supersedes_nothing(
    world: World, call: int, step: int, later: float
) -> None:
    """Of an earlier step, of another call, or from before the run resumed."""
    staged = world.take(0, 5, scheduled=False)
    world.scheduler.record_published(call, step, taken_at=staged.staged_at + later)
    world.scheduler.flush(restore=True)
    assert world.durable == ["snapshot-5"]


def test_a_scheduled_snapshot_is_drained_even_if_a_newer_checkpoint_exists(world: World) -> None:
    """The script asked for it."""
    world.take(0, 5)
    world.scheduler.record_published(1, 9)
    world.poll()
    world.poll()
    assert world.durable == ["checkpoint-5"]


# ---- closing ----


def test_closing_frees_the_memory_when_every_snapshot_is_done(world: World) -> None:
    """Superseded snapshots need not be on disk."""
    world.take(0, 5)
    world.take(1, 4, scheduled=False)
    world.scheduler.flush(restore=False)
    world.scheduler.close()
    assert not world.staging.path.exists()
    assert world.warnings == []
    assert not world.processes[0].alive


@pytest.mark.parametrize("scheduled", [True, False])
def test_closing_keeps_the_memory_of_an_undrained_newest_snapshot(world: World, scheduled: bool) -> None:
    """The run may be resumed from it."""
    world.take(0, 9, scheduled=scheduled)
    world.scheduler.close()
    assert [staged.step for staged, _ in world.staging.snapshots()] == [9]
    assert world.warnings == [
        f"snapshots that could not be written to disk are kept in memory, in {world.staging.path}"
    ]


def test_closing_keeps_the_memory_of_an_undrained_scheduled_snapshot(world: World) -> None:
    """A newer one on disk does not replace it."""
    world.take(0, 5)
    world.take(1, 9)
    world.staging.slots[1].mark_drained()
    world.scheduler.close()
    assert world.staging.snapshots()


def test_closing_frees_the_memory_of_a_broken_snapshot(world: World) -> None:
    """It cannot be drained."""
    world.take(0, 9)
    world.staging.slots[0].index_path(0).write_text("{")
    world.scheduler.flush(restore=False)
    world.scheduler.close()
    assert not world.staging.path.exists()


def test_closing_without_any_snapshot_frees_the_memory(world: World) -> None:
    """The run ended before its first snapshot."""
    world.scheduler.close()
    assert not world.staging.path.exists()
    assert world.warnings == []
