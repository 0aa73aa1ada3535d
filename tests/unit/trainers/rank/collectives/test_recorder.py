"""The log of a rank's collectives, on a real Gloo group of one rank and with fakes for what that cannot show."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import math
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collective_entries import add_entry
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import AllreduceOptions

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.detection import flight_recorder
from grpo_run.trainers.rank.collectives.call_descriptions import MAX_TENSORS
from grpo_run.trainers.rank.collectives.recorder import MAX_TRACKED, Recorder
from grpo_run.trainers.rank.worker_server import start_worker_server
from grpo_run.trainers.upstream import torch_groups
from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    operation_name,
)
from grpo_run.watchdog.deadlocks.recording import parse_recording


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """The default process group: Gloo, with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def warnings() -> list[str]:
    """The warnings of the recorder."""
    return []


@pytest.fixture
def recorder(slot: SlotWriter, warnings: list[str]) -> Recorder:
    """A recorder that writes to the slot."""
    return Recorder(slot, warnings.append)


@pytest.fixture
def installed(recorder: Recorder, group: None, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The recorder, installed in torch's classes, whose methods are restored."""
    for name in torch_groups.COLLECTIVE_METHODS:
        monkeypatch.setattr(c10d.ProcessGroup, name, getattr(c10d.ProcessGroup, name))
    monkeypatch.setattr(c10d.Work, "wait", c10d.Work.wait)
    recorder.install(c10d)
    return recorder


def entries(board: Board) -> tuple[Collective, ...]:
    """Return the log as a reader sees it."""
    return board.collective_log(0)


class Handle:
    """A fake `Work` that supports weak references."""


class DistributedDataParallel:
    """The recorder recognizes torch's class by this name."""

    def __init__(self) -> None:
        self.process_group = dist.group.WORLD


def here() -> int:
    """Return the caller's line number."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_collective_is_logged_with_the_users_line(
    installed: Recorder, board: Board, slot: SlotWriter
) -> None:
    """Operation, sizes, members and step; torch's own frames are skipped."""
    slot.step = 7
    tensor = torch.ones(2, 3)
    line = here() + 1
    dist.all_reduce(tensor)
    (entry,) = entries(board)
    assert (entry.group, entry.operation, entry.step) == ("0", "all_reduce", 8)
    assert (entry.sizes, entry.dtypes, entry.members) == (((2, 3),), ("Float",), (0,))
    assert entry.location is not None
    assert (Path(entry.location.file).name, entry.location.line) == (Path(__file__).name, line)
    assert "test_a_collective_is_logged_with_the_users_line".startswith(entry.location.function)


def test_results_are_unchanged(installed: Recorder) -> None:
    """The recorder does not change what a collective does."""
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


def test_a_collective_is_complete_after_its_wait(installed: Recorder, board: Board) -> None:
    """A synchronous collective at once; an asynchronous one when its handle has been waited for."""
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert entries(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_an_entry_is_waiting_while_a_thread_waits(
    recorder: Recorder, board: Board, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the thread's id, as seen from inside the wait."""
    seen: list[CollectiveProgress] = []
    waiters: list[str] = []

    class Work:
        """A handle whose wait reads the board."""

        def wait(self) -> bool:
            seen.append(entries(board)[-1].progress)
            waiters.append(entries(board)[-1].thread)
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    call = recorder.log(dist.group.WORLD, "allreduce", ([torch.ones(1)],))
    recorder.track(work, call.number, call.on_host)
    assert work.wait() is True
    assert seen == [CollectiveProgress.waiting]
    assert waiters == [str(threading.get_ident())]
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_a_failed_wait_leaves_the_entry_incomplete_and_not_waiting(recorder: Recorder, board: Board) -> None:
    """As when a peer is gone. The error is torch's own."""

    class Work:
        """A handle whose peer is gone."""

        def wait(self) -> bool:
            raise RuntimeError("Connection closed by peer")

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_a_wait_on_a_device_does_not_complete_the_entry(recorder: Recorder, board: Board) -> None:
    """It orders streams and returns; the Flight Recorder knows when the work is done."""

    class Work:
        """A handle of work on a device."""

        def wait(self) -> bool:
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    number = recorder._add("0", 1, "allreduce", [], 0b11, sys._getframe())
    recorder.track(work, number, False)
    work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_only_the_first_wait_is_marked(recorder: Recorder, board: Board) -> None:
    """A second wait on the same handle returns at once. A handle that is not tracked is passed through."""

    class Work:
        """A handle."""

        def wait(self) -> bool:
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0)
    assert work.wait()
    assert work.wait()
    assert Work().wait()
    assert [entry.progress for entry in entries(board)] == [CollectiveProgress.completed]


def test_sequence_numbers_equal_those_of_torch(installed: Recorder, board: Board) -> None:
    """Entries and Flight Recorder records are joined by them."""
    before = torch_groups.sequence_number(dist.group.WORLD)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_gather([torch.ones(2)], tensor)
    dist.barrier()
    dist.broadcast(tensor, src=0)
    dist.reduce(tensor, dst=0)
    dist.all_gather_single(torch.ones(2), tensor)
    dist.scatter(tensor, [torch.ones(2)], src=0)
    dist.gather(tensor, [torch.ones(2)], dst=0)
    made = entries(board)
    assert [entry.sequence for entry in made] == list(range(before + 1, before + 9))
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
    assert [entry.operation for entry in made] == expected
    assert torch_groups.sequence_number(dist.group.WORLD) == before + 8


def test_input_sizes_are_logged_if_outputs_come_first(installed: Recorder, board: Board) -> None:
    """As in the Flight Recorder; outputs differ from inputs in size."""
    dist.reduce_scatter(torch.zeros(5), [torch.ones(5)])
    dist.all_gather_single(torch.zeros(6), torch.ones(6))
    assert [entry.sizes for entry in entries(board)] == [((5,),), ((6,),)]


def test_each_group_has_its_own_sequence(installed: Recorder, board: Board) -> None:
    """Entries carry the name of the group."""
    other = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=other)
    entry = entries(board)[-1]
    assert entry.group == other.group_name != "0"
    assert (entry.sequence, entry.members) == (1, (0,))
    dist.destroy_process_group(other)


def test_a_collective_that_cannot_be_issued_raises_torchs_error(installed: Recorder, board: Board) -> None:
    """The next collective works."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_gather_single(torch.ones(3), torch.ones(2))
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed


def nameless_group() -> Any:
    """A Gloo group without a name, which torch's Python layer does not know."""
    group = c10d.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group


def named_group() -> Any:
    """A Gloo group with a name that torch's Python layer does not know."""
    group = nameless_group()
    group._set_group_name("mine")
    return group


@pytest.mark.parametrize("make", [nameless_group, named_group])
def test_a_collective_of_a_foreign_group_is_issued_without_an_entry(
    installed: Recorder, board: Board, warnings: list[str], make: Callable[[], Any]
) -> None:
    """There is one warning, however many collectives follow."""
    foreign = make()
    for _ in range(3):
        tensor = torch.full((2,), 5.0)
        foreign.allreduce([tensor]).wait()
        assert torch.equal(tensor, torch.full((2,), 5.0))
    assert entries(board) == ()
    (warning,) = warnings
    assert "allreduce could not be logged (" in warning
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_a_collective_of_a_backend_without_sequence_numbers_is_issued_without_an_entry(
    installed: Recorder, board: Board, warnings: list[str]
) -> None:
    """It could not be compared with those of other ranks."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    fake = dist.new_group([0], backend="fake")
    before = len(entries(board))
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=fake)
    assert len(entries(board)) == before
    assert len(warnings) == 1
    dist.destroy_process_group(fake)


def test_a_collective_without_inputs_is_logged_without_sizes(
    recorder: Recorder, board: Board, group: None
) -> None:
    """Its outputs are not inputs."""
    recorder.log(dist.group.WORLD, "gather", ([[torch.ones(1)]],))
    (entry,) = entries(board)
    assert (entry.operation, entry.sizes, entry.dtypes) == ("gather", (), ())


@pytest.mark.parametrize("many", [MAX_TENSORS, MAX_TENSORS + 1])
def test_sizes_of_many_tensors_are_logged_completely_or_not_at_all(
    recorder: Recorder, board: Board, group: None, many: int
) -> None:
    """A part of them would differ from the complete."""
    recorder.log(dist.group.WORLD, "allreduce_coalesced", ([torch.ones(3)] * many,))
    (entry,) = entries(board)
    complete = many <= MAX_TENSORS
    assert entry.sizes == (((3,),) * many if complete else ())
    assert set(entry.dtypes) == ({"Float"} if complete else set())


def test_entries_of_one_line_have_their_own_sizes(installed: Recorder, board: Board) -> None:
    """The constant part of an entry is encoded once per line, input and group."""
    other = dist.new_group([0])
    for tensor in (torch.ones(3), torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(3)):
        for group in (dist.group.WORLD, other):
            dist.all_reduce(tensor, group=group)
    seen = [(entry.sizes, entry.dtypes, entry.group) for entry in entries(board)]
    assert seen == [
        (((size,),), (dtype,), group)
        for size, dtype in ((3, "Float"), (4, "Float"), (4, "Long"), (3, "Float"))
        for group in ("0", other.group_name)
    ]
    dist.destroy_process_group(other)


def test_two_collectives_of_one_function_have_their_own_lines(installed: Recorder, board: Board) -> None:
    """Also if they are alike."""
    tensor, line = torch.ones(2), here()
    for _ in range(2):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    lines = [entry.location.line for entry in entries(board) if entry.location is not None]
    assert lines == [line + 2, line + 3] * 2


def test_symbolic_sizes_are_no_reason_to_lose_an_entry(
    recorder: Recorder, board: Board, group: None, warnings: list[str]
) -> None:
    """A traced tensor has sizes without a hash."""

    class Symbol(list[str]):
        """Has no hash, and a name."""

        def __str__(self) -> str:
            return "s0"

    traced = SimpleNamespace(shape=(Symbol(), 3), dtype=torch.float32, is_cpu=True)
    for _ in range(2):
        recorder.log(dist.group.WORLD, "allreduce", ([traced],))
    assert [(entry.operation, entry.sizes) for entry in entries(board)] == [("all_reduce", ())] * 2
    assert warnings == []


@pytest.mark.parametrize("name", torch_groups.COLLECTIVE_METHODS)
def test_every_method_name_fits_an_entry(board: Board, slot: SlotWriter, name: str) -> None:
    """A truncated name would be another operation."""
    add_entry(slot.collective_log, operation=name)
    assert entries(board)[0].operation == operation_name(name)


def test_the_oldest_tracked_handles_are_dropped(recorder: Recorder) -> None:
    """A script may never wait for some."""
    works = [Handle() for _ in range(MAX_TRACKED + 10)]
    for number, work in enumerate(works, 1):
        recorder.track(work, number, True)
    assert len(recorder._tracked) == MAX_TRACKED
    assert id(works[0]) not in recorder._tracked
    number, on_host, tracked = recorder._tracked[id(works[-1])]
    assert (number, on_host, tracked()) == (len(works), True, works[-1])


def test_a_new_handle_at_the_address_of_a_freed_one_is_not_tracked(recorder: Recorder, board: Board) -> None:
    """Its wait must not mark the entry of the freed handle."""

    class Work:
        """A handle whose wait reads the board."""

        def wait(self) -> CollectiveProgress:
            return entries(board)[-1].progress

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    dropped, send = Work(), Work()
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), dropped, members=0)
    recorder._tracked[id(send)] = recorder._tracked.pop(id(dropped))
    del dropped
    assert send.wait() is CollectiveProgress.enqueued
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_tracking_keeps_no_tensor_alive(installed: Recorder) -> None:
    """A handle refers to its tensors, which occupy device memory."""
    tensor = torch.ones(1)
    before = sys.getrefcount(tensor)
    dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 20.0
    while (
        sys.getrefcount(tensor) != before
    ):  # Gloo's own thread refers to it until the collective has completed
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gc.collect()


def test_a_vote_is_logged_under_its_own_group(recorder: Recorder, board: Board) -> None:
    """Torch's Python layer does not know that group."""
    recorder.log_own("grpo_run/vote", 7, "allreduce", torch.ones(8), Handle(), members=0b101)
    (entry,) = entries(board)
    assert (entry.group, entry.sequence, entry.operation) == ("grpo_run/vote", 7, "all_reduce")
    assert (entry.members, entry.sizes, entry.dtypes) == ((0, 2), ((8,),), ("Float",))


def test_a_backward_is_logged_from_start_to_end(recorder: Recorder, board: Board, group: None) -> None:
    """With the sequence number of its first all-reduce. No thread counts as waiting."""
    expected = torch_groups.sequence_number(dist.group.WORLD) + 1
    with recorder.backward(DistributedDataParallel()):
        (entry,) = entries(board)
        assert (entry.operation, entry.sequence, entry.progress) == (
            BACKWARD,
            expected,
            CollectiveProgress.enqueued,
        )
    assert entries(board)[0].progress is CollectiveProgress.completed


@pytest.mark.parametrize("kind", ["Linear", "FullyShardedDataParallel"])
def test_only_a_ddp_model_has_its_backward_logged(
    recorder: Recorder, board: Board, group: None, kind: str
) -> None:
    """A single rank and DeepSpeed have no such group; FSDP's backward issues other collectives."""
    model = type(kind, (), {"process_group": dist.group.WORLD})()
    with recorder.backward(model):
        pass
    assert entries(board) == ()


def test_a_backward_that_cannot_be_logged_runs(
    recorder: Recorder, board: Board, warnings: list[str], group: None
) -> None:
    """A foreign process group causes this."""
    model = DistributedDataParallel()
    model.process_group = c10d.ProcessGroup(dist.HashStore(), 0, 1)
    happened = False
    with recorder.backward(model):
        happened = True
    assert happened
    assert entries(board) == ()
    assert len(warnings) == 1


def test_a_failed_backward_is_complete(recorder: Recorder, board: Board, group: None) -> None:
    """A script may continue after an out-of-memory error. The error is raised unchanged."""
    with pytest.raises(ZeroDivisionError), recorder.backward(DistributedDataParallel()):
        raise ZeroDivisionError
    assert entries(board)[0].progress is CollectiveProgress.completed


def test_the_worker_server_serves_the_flight_recorder(
    installed: Recorder, board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    """To the client that the supervisor uses. Its own warning is suppressed, output of the script is not."""
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


def test_a_worker_server_that_cannot_start_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """A RuntimeError; standard error is restored."""
    with pytest.raises(RuntimeError):
        start_worker_server("/nowhere/at/all/s")
    print("heard", file=sys.stderr)
    assert "heard" in capfd.readouterr().err


class Waited:
    """A handle. `after` lists what each wait does; the last entry repeats."""

    def __init__(self, board: Board, *after: Exception | None) -> None:
        self.board, self.after, self.seen, self.given = (
            board,
            list(after),
            list[CollectiveProgress](),
            list[Any](),
        )

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Read the board, and raise if `after` says so."""
        self.seen.append(entries(self.board)[-1].progress)
        self.given.append((args, kwargs))
        error = self.after.pop(0) if self.after else None
        if error is not None:
            raise error
        return True


@pytest.fixture
def waited(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> type[Waited]:
    """The class, installed in place of torch's `Work`; its own `wait` is restored."""
    monkeypatch.setattr(Waited, "wait", Waited.wait)
    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Waited))
    return Waited


def test_a_time_limit_of_the_script_is_recorded(installed: Recorder, board: Board) -> None:
    """Such a collective ends by itself, so it proves no hang. A script may call the group's methods, or torch's functions."""
    options = AllreduceOptions()
    options.timeout = timedelta(seconds=30)
    group = dist.distributed_c10d._get_default_group()
    group.allreduce([torch.ones(2)], options).wait()
    group.allreduce([torch.ones(2)]).wait()
    dist.barrier(timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(2))
    limits = [entry.timeout_seconds for entry in entries(board)[-4:]]
    assert limits == [0.0, math.inf, 0.0, math.inf]


@pytest.mark.parametrize(("args", "kwargs"), [((3.0,), {}), ((), {"timeout": 3.0})])
def test_a_wait_with_a_time_limit_is_not_marked(
    recorder: Recorder, board: Board, waited: type[Waited], args: Any, kwargs: Any
) -> None:
    """It will return. A wait without a limit afterwards is marked."""
    work = waited(board, RuntimeError("timed out"))
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(*args, **kwargs)
    work.wait()
    assert work.given == [(args, kwargs), ((), {})]
    assert work.seen == [CollectiveProgress.enqueued, CollectiveProgress.waiting]
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_a_second_wait_after_a_failed_one_is_marked_too(
    recorder: Recorder, board: Board, waited: type[Waited]
) -> None:
    """The first one may have been interrupted. The handle is released when a wait returns."""
    work = waited(board, RuntimeError("interrupted"))
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="interrupted"):
        work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert work.seen == [CollectiveProgress.waiting, CollectiveProgress.waiting]
    assert entries(board)[-1].progress is CollectiveProgress.completed
    assert recorder._tracked == {}


class OddError(Exception):
    """An error that no caller expects."""


def test_a_vote_that_cannot_be_logged_is_issued(
    recorder: Recorder, board: Board, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error is tolerated, with one warning."""

    def fail(*args: Any, **kwargs: Any) -> int:
        raise OddError("no")

    monkeypatch.setattr(recorder, "_add", fail)
    for sequence in (1, 2):
        recorder.log_own("grpo_run/vote", sequence, "allreduce", torch.ones(8), Handle(), members=0b11)
    assert warnings == ["a vote could not be logged (OddError: no); other collectives may be missing too"]
    assert recorder._tracked == {}


def test_a_handle_that_cannot_be_tracked_is_returned(recorder: Recorder, warnings: list[str]) -> None:
    """A handle may not support weak references."""

    class Slotted:
        """A handle that does not support weak references."""

        __slots__ = ()

    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), Slotted(), members=0b11)
    assert len(warnings) == 1
    assert "a Work handle could not be logged (TypeError" in warnings[0]


def test_a_collective_of_a_group_that_raises_is_issued(
    recorder: Recorder, board: Board, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error of the group's attributes is tolerated."""
    work = Handle()
    odd = type("ProcessGroup", (), {"allreduce": lambda self, tensors: work})

    def fail(*args: Any) -> Any:
        raise OddError("no")

    monkeypatch.setattr(recorder, "log", fail)
    recorder.install(SimpleNamespace(ProcessGroup=odd, Work=type("Work", (), {"wait": lambda self: True})))
    assert odd().allreduce([]) is work  # type: ignore[attr-defined]
    assert warnings == ["allreduce could not be logged (OddError: no); other collectives may be missing too"]
    assert entries(board) == ()
