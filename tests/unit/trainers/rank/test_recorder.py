"""What a rank notes of its collectives: on a real Gloo group of one, and with stand-ins for what that cannot show."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.detection import flight_recorder
from grpo_run.trainers import upstream
from grpo_run.trainers.rank.recorder import (
    MAX_TENSORS,
    MAX_UNWAITED,
    Recorder,
    start_heartbeat,
    start_worker_server,
)
from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    operation_name,
)
from grpo_run.watchdog.deadlocks.recording import parse_recording


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """The default group: Gloo, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def warnings() -> list[str]:
    """What the recorder warned of."""
    return []


@pytest.fixture
def recorder(slot: SlotWriter, warnings: list[str]) -> Recorder:
    """Writes into the slot."""
    return Recorder(slot, warnings.append)


@pytest.fixture
def installed(recorder: Recorder, group: None, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """In torch's own classes, which get their methods back."""
    for name in upstream.COLLECTIVE_METHODS:
        monkeypatch.setattr(c10d.ProcessGroup, name, getattr(c10d.ProcessGroup, name))
    monkeypatch.setattr(c10d.Work, "wait", c10d.Work.wait)
    recorder.install(c10d)
    return recorder


def notes(board: Board) -> tuple[Collective, ...]:
    """What a reader sees."""
    return board.collective_log(0)


class Handle:
    """Stands for a `Work`: weak references may be taken of it."""


class DistributedDataParallel:
    """Known to the recorder by its name, as torch's own."""

    def __init__(self) -> None:
        self.process_group = dist.group.WORLD


def here() -> int:
    """The caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_collective_is_noted_with_the_users_line(
    installed: Recorder, board: Board, slot: SlotWriter
) -> None:
    """Operation, shape, members and step, through all of torch's own frames."""
    slot.step = 7
    tensor = torch.ones(2, 3)
    line = here() + 1
    dist.all_reduce(tensor)
    (note,) = notes(board)
    assert (note.group, note.operation, note.step) == ("0", "all_reduce", 8)
    assert (note.sizes, note.dtypes, note.members) == (((2, 3),), ("Float",), (0,))
    assert note.location is not None
    assert (Path(note.location.file).name, note.location.line) == (Path(__file__).name, line)
    assert "test_a_collective_is_noted_with_the_users_line".startswith(note.location.function)


def test_results_are_what_they_were(installed: Recorder) -> None:
    """The recorder looks on."""
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor)
    gathered = [torch.zeros(3)]
    dist.all_gather(gathered, tensor)
    assert torch.equal(gathered[0], torch.arange(3.0))
    dist.broadcast(tensor, src=0)
    dist.barrier()
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]


def test_a_collective_that_was_waited_for_is_complete(installed: Recorder, board: Board) -> None:
    """Synchronous ones at once; asynchronous ones when their handle is waited for."""
    dist.all_reduce(torch.ones(1))
    assert notes(board)[-1].progress is CollectiveProgress.completed
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert notes(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert notes(board)[-1].progress is CollectiveProgress.completed


def test_a_note_says_waiting_while_a_thread_waits(
    recorder: Recorder, board: Board, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from inside the wait itself, with the thread's id."""
    seen: list[CollectiveProgress] = []
    waiters: list[str] = []

    class Work:
        """A handle whose wait looks at the board."""

        def wait(self) -> bool:
            seen.append(notes(board)[-1].progress)
            waiters.append(notes(board)[-1].waiter)
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    number, on_host = recorder.note(dist.group.WORLD, "allreduce", ([torch.ones(1)],))
    recorder.follow(work, number, on_host)
    assert work.wait() is True
    assert seen == [CollectiveProgress.waiting]
    assert waiters == [str(threading.get_ident())]
    assert notes(board)[-1].progress is CollectiveProgress.completed


def test_a_wait_that_fails_leaves_the_note_open_and_nobody_waiting(recorder: Recorder, board: Board) -> None:
    """A peer was gone: it never completed, the thread goes on, and the error is torch's own."""

    class Work:
        """A handle whose peer is gone."""

        def wait(self) -> bool:
            raise RuntimeError("Connection closed by peer")

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    recorder.vote("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()
    assert notes(board)[-1].progress is CollectiveProgress.enqueued


def test_on_a_device_a_wait_completes_nothing(recorder: Recorder, board: Board) -> None:
    """It orders streams and returns: when the work is done, torch's recorder knows."""

    class Work:
        """A handle of a device's work."""

        def wait(self) -> bool:
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    number = recorder._add("0", 1, "allreduce", [], 0b11)
    recorder.follow(work, number, False)
    work.wait()
    assert notes(board)[-1].progress is CollectiveProgress.enqueued


def test_only_the_first_wait_is_marked(recorder: Recorder, board: Board) -> None:
    """A second one on the same handle returns at once; a handle nobody followed is let through."""

    class Work:
        """A handle."""

        def wait(self) -> bool:
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    recorder.vote("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0)
    assert work.wait()
    assert work.wait()
    assert Work().wait()
    assert [note.progress for note in notes(board)] == [CollectiveProgress.completed]


def test_sequence_numbers_are_torchs(installed: Recorder, board: Board) -> None:
    """Both sources are joined by them: each kind of collective counts one."""
    before = upstream.sequence_number(dist.group.WORLD)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_gather([torch.ones(2)], tensor)
    dist.barrier()
    dist.broadcast(tensor, src=0)
    dist.reduce(tensor, dst=0)
    dist.all_gather_single(torch.ones(2), tensor)
    dist.scatter(tensor, [torch.ones(2)], src=0)
    dist.gather(tensor, [torch.ones(2)], dst=0)
    made = notes(board)
    assert [note.sequence for note in made] == list(range(before + 1, before + 9))
    expected = [
        "all_reduce",
        "all_gather",
        "barrier",
        "broadcast",
        "reduce",
        "all_gather",
        "scatter",
        "gather",
    ]
    assert [note.operation for note in made] == expected
    assert upstream.sequence_number(dist.group.WORLD) == before + 8


def test_inputs_are_noted_where_outputs_come_first(installed: Recorder, board: Board) -> None:
    """As torch's recorder does: outputs differ from inputs in size."""
    dist.reduce_scatter(torch.zeros(5), [torch.ones(5)])
    dist.all_gather_single(torch.zeros(6), torch.ones(6))
    assert [note.sizes for note in notes(board)] == [((5,),), ((6,),)]


def test_another_groups_collectives_are_its_own(installed: Recorder, board: Board) -> None:
    """By name, with its own count."""
    other = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=other)
    note = notes(board)[-1]
    assert note.group == other.group_name != "0"
    assert (note.sequence, note.members) == (1, (0,))
    dist.destroy_process_group(other)


def test_a_collective_that_cannot_be_issued_raises_as_it_did(installed: Recorder, board: Board) -> None:
    """Torch's own words; the next one goes well."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_gather_single(torch.ones(3), torch.ones(2))
    dist.all_reduce(torch.ones(1))
    assert notes(board)[-1].progress is CollectiveProgress.completed


def nameless_group() -> Any:
    """A Gloo group that torch's Python layer did not make, without even a name."""
    group = c10d.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group


def named_group() -> Any:
    """One that has a name, which torch's Python layer does not know."""
    group = nameless_group()
    group._set_group_name("mine")
    return group


@pytest.mark.parametrize("make", [nameless_group, named_group])
def test_a_collective_of_a_foreign_group_happens_without_a_note(
    installed: Recorder, board: Board, warnings: list[str], make: Callable[[], Any]
) -> None:
    """A library may make its own; one warning says so, however many collectives follow."""
    foreign = make()
    for _ in range(3):
        tensor = torch.full((2,), 5.0)
        foreign.allreduce([tensor]).wait()
        assert torch.equal(tensor, torch.full((2,), 5.0))
    assert notes(board) == ()
    (warning,) = warnings
    assert "allreduce could not be noted (" in warning
    dist.all_reduce(torch.ones(1))
    assert notes(board)[-1].progress is CollectiveProgress.completed


def test_a_collective_of_a_backend_that_does_not_count_happens_without_a_note(
    installed: Recorder, board: Board, warnings: list[str]
) -> None:
    """Without sequence numbers it could be compared with nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    fake = dist.new_group([0], backend="fake")
    before = len(notes(board))
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=fake)
    assert len(notes(board)) == before
    assert len(warnings) == 1
    dist.destroy_process_group(fake)


def test_a_collective_without_inputs_is_noted_without_sizes(
    recorder: Recorder, board: Board, group: None
) -> None:
    """Its outputs are no inputs."""
    recorder.note(dist.group.WORLD, "gather", ([[torch.ones(1)]],))
    (note,) = notes(board)
    assert (note.operation, note.sizes, note.dtypes) == ("gather", (), ())


@pytest.mark.parametrize("many", [MAX_TENSORS, MAX_TENSORS + 1])
def test_sizes_of_many_tensors_are_all_noted_or_none(
    recorder: Recorder, board: Board, group: None, many: int
) -> None:
    """Part of them would compare unequal to the whole."""
    recorder.note(dist.group.WORLD, "allreduce_coalesced", ([torch.ones(3)] * many,))
    (note,) = notes(board)
    whole = many <= MAX_TENSORS
    assert note.sizes == (((3,),) * many if whole else ())
    assert set(note.dtypes) == ({"Float"} if whole else set())


@pytest.mark.parametrize("name", upstream.COLLECTIVE_METHODS)
def test_no_methods_name_is_too_long_for_a_note(board: Board, slot: SlotWriter, name: str) -> None:
    """Half a name would be another operation."""
    slot.collective_log.add(
        group="0", sequence=1, operation=name, sizes="3", dtypes="Float", file="t.py", line=1, function="f", step=1
    )  # fmt: skip
    assert notes(board)[0].operation == operation_name(name)


def test_handles_nobody_waits_for_are_forgotten(recorder: Recorder) -> None:
    """A script may drop them for ever: the oldest go first."""
    works = [Handle() for _ in range(MAX_UNWAITED + 10)]
    for number, work in enumerate(works, 1):
        recorder.follow(work, number, True)
    assert len(recorder._unwaited) == MAX_UNWAITED
    assert id(works[0]) not in recorder._unwaited
    number, on_host, followed = recorder._unwaited[id(works[-1])]
    assert (number, on_host, followed()) == (len(works), True, works[-1])


def test_a_handle_at_the_address_of_one_that_is_gone_is_another(recorder: Recorder, board: Board) -> None:
    """The note of a vote whose handle was dropped must not be marked by a send's, which nobody follows."""

    class Work:
        """A handle whose wait looks at the board."""

        def wait(self) -> CollectiveProgress:
            return notes(board)[-1].progress

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    dropped, send = Work(), Work()
    recorder.vote("grpo_run/vote", 1, "allreduce", torch.ones(8), dropped, members=0)
    recorder._unwaited[id(send)] = recorder._unwaited.pop(id(dropped))
    del dropped
    assert send.wait() is CollectiveProgress.enqueued
    assert notes(board)[-1].progress is CollectiveProgress.enqueued


def test_following_keeps_nothing_alive(installed: Recorder) -> None:
    """A handle holds its tensors: keeping it would cost the device's memory."""
    tensor = torch.ones(1)
    before = sys.getrefcount(tensor)
    dist.all_reduce(tensor, async_op=True)
    gc.collect()
    assert sys.getrefcount(tensor) == before


def test_a_vote_is_noted_under_its_own_group(recorder: Recorder, board: Board) -> None:
    """Torch's Python layer does not know that group."""
    recorder.vote("grpo_run/vote", 7, "allreduce", torch.ones(8), Handle(), members=0b101)
    (note,) = notes(board)
    assert (note.group, note.sequence, note.operation) == ("grpo_run/vote", 7, "all_reduce")
    assert (note.members, note.sizes, note.dtypes) == ((0, 2), ((8,),), ("Float",))


def test_a_backward_is_noted_from_begin_to_end(recorder: Recorder, board: Board, group: None) -> None:
    """With the sequence number its first all-reduce will have, and no wait of its own."""
    expected = upstream.sequence_number(dist.group.WORLD) + 1
    with recorder.backward(DistributedDataParallel()):
        (note,) = notes(board)
        assert (note.operation, note.sequence, note.progress) == (
            BACKWARD,
            expected,
            CollectiveProgress.enqueued,
        )
    assert notes(board)[0].progress is CollectiveProgress.completed


@pytest.mark.parametrize("kind", ["Linear", "FullyShardedDataParallel"])
def test_a_model_that_is_not_ddps_has_no_backward_to_note(
    recorder: Recorder, board: Board, group: None, kind: str
) -> None:
    """One rank, or DeepSpeed; FSDP has a group as well, and gathers in its backward."""
    model = type(kind, (), {"process_group": dist.group.WORLD})()
    with recorder.backward(model):
        pass
    assert notes(board) == ()


def test_a_backward_that_cannot_be_noted_happens(
    recorder: Recorder, board: Board, warnings: list[str], group: None
) -> None:
    """Of a group of somebody else's making, say."""
    model = DistributedDataParallel()
    model.process_group = c10d.ProcessGroup(dist.HashStore(), 0, 1)
    happened = False
    with recorder.backward(model):
        happened = True
    assert happened
    assert notes(board) == ()
    assert len(warnings) == 1


def test_a_backward_that_fails_is_over(recorder: Recorder, board: Board, group: None) -> None:
    """A script that goes on after running out of memory is not in it for ever; the error goes on."""
    with pytest.raises(ZeroDivisionError), recorder.backward(DistributedDataParallel()):
        raise ZeroDivisionError
    assert notes(board)[0].progress is CollectiveProgress.completed


def test_the_beat_goes_on_by_itself(slot: SlotWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a thread that does not hold the process up."""
    beaten = threading.Semaphore(0)
    thread = start_heartbeat(SimpleNamespace(heartbeat=beaten.release), 0.001)  # type: ignore[arg-type]
    assert thread.daemon
    assert all(beaten.acquire(timeout=10) for _ in range(3))


def test_the_server_hands_out_what_torch_recorded(
    installed: Recorder, board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asked as the supervisor asks it; its warning is kept from the user, whose own words are not."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="g")
    server = start_worker_server(f"{folder}/s")
    try:
        print("the script's own", file=sys.stderr)
        dist.all_reduce(torch.ones(4))
        answers, failures = flight_recorder.fetch({0: f"{folder}/s"}, 20.0)
    finally:
        server.shutdown()
        shutil.rmtree(folder)
    assert failures == {}
    parse_recording(answers[0])
    said = capfd.readouterr().err
    assert "the script's own" in said
    assert "listening" not in said


def test_a_server_that_cannot_start_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """As a RuntimeError, with standard error given back."""
    with pytest.raises(RuntimeError):
        start_worker_server("/nowhere/at/all/s")
    print("heard", file=sys.stderr)
    assert "heard" in capfd.readouterr().err


class Waited:
    """A handle; `after` says what each wait does, the last one for ever."""

    def __init__(self, board: Board, *after: Exception | None) -> None:
        self.board, self.after, self.seen, self.given = (
            board,
            list(after),
            list[CollectiveProgress](),
            list[Any](),
        )

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Looks at the board, and fails if it is to."""
        self.seen.append(notes(self.board)[-1].progress)
        self.given.append((args, kwargs))
        error = self.after.pop(0) if self.after else None
        if error is not None:
            raise error
        return True


@pytest.fixture
def waited(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> type[Waited]:
    """Installed in its stead of torch's `Work`; gets its own `wait` back."""
    monkeypatch.setattr(Waited, "wait", Waited.wait)
    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Waited))
    return Waited


@pytest.mark.parametrize(("args", "kwargs"), [((3.0,), {}), ((), {"timeout": 3.0})])
def test_a_wait_with_a_timeout_is_no_wait_for_ever(
    recorder: Recorder, board: Board, waited: type[Waited], args: Any, kwargs: Any
) -> None:
    """It means to come back, so it is not marked; a plain wait afterwards is."""
    work = waited(board, RuntimeError("timed out"))
    recorder.vote("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(*args, **kwargs)
    work.wait()
    assert work.given == [(args, kwargs), ((), {})]
    assert work.seen == [CollectiveProgress.enqueued, CollectiveProgress.waiting]
    assert notes(board)[-1].progress is CollectiveProgress.completed


def test_a_second_wait_after_a_failed_one_is_marked_too(
    recorder: Recorder, board: Board, waited: type[Waited]
) -> None:
    """The first was interrupted, say; once it is over the handle is let go of."""
    work = waited(board, RuntimeError("interrupted"))
    recorder.vote("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="interrupted"):
        work.wait()
    assert notes(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert work.seen == [CollectiveProgress.waiting, CollectiveProgress.waiting]
    assert notes(board)[-1].progress is CollectiveProgress.completed
    assert recorder._unwaited == {}


class OddError(Exception):
    """No kind of error that anybody counts on."""


def test_a_vote_that_cannot_be_noted_happens(
    recorder: Recorder, board: Board, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises; warned of once."""

    def fail(*args: Any) -> int:
        raise OddError("no")

    monkeypatch.setattr(recorder, "_add", fail)
    for sequence in (1, 2):
        recorder.vote("grpo_run/vote", sequence, "allreduce", torch.ones(8), Handle(), members=0b11)
    assert warnings == ["a vote could not be noted (OddError: no); others may not be either"]
    assert recorder._unwaited == {}


def test_a_handle_that_cannot_be_followed_is_returned(recorder: Recorder, warnings: list[str]) -> None:
    """A collective whose group raises anything at all, and whose handle takes no weak references, is as it was."""

    class Slotted:
        """No weak references."""

        __slots__ = ()

    recorder.vote("grpo_run/vote", 1, "allreduce", torch.ones(8), Slotted(), members=0b11)
    assert len(warnings) == 1
    assert "a handle could not be noted (TypeError" in warnings[0]


def test_a_group_that_raises_anything_issues_all_the_same(
    recorder: Recorder, board: Board, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only what torch's own raise."""
    work = Handle()
    odd = type("ProcessGroup", (), {"allreduce": lambda self, tensors: work})

    def fail(*args: Any) -> Any:
        raise OddError("no")

    monkeypatch.setattr(recorder, "note", fail)
    recorder.install(SimpleNamespace(ProcessGroup=odd, Work=type("Work", (), {"wait": lambda self: True})))
    assert odd().allreduce([]) is work  # type: ignore[attr-defined]
    assert warnings == ["allreduce could not be noted (OddError: no); others may not be either"]
    assert notes(board) == ()
