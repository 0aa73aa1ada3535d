"""Reports of a rank's threads: what waits in a collective, what only sleeps, and what may still act."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank import worker_server
from grpo_run.runtime.rank.collective_recorder import OwnLog, Recorder
from grpo_run.runtime.rank.heartbeat import start_heartbeat
from grpo_run.runtime.rank.worker_server import report_threads
from grpo_run.runtime.upstream import torch_names
from grpo_run.watchdog.deadlocks.positions import ThreadReport


@pytest.fixture
def recorder(slot: SlotWriter) -> Recorder:
    """A recorder that writes to the slot."""
    return Recorder(slot)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that ends the threads of a test."""
    event = threading.Event()
    yield event
    event.set()


def of_others(recorder: Recorder) -> ThreadReport:
    """The report without the main thread, which runs the test."""
    report = report_threads(recorder)
    active = tuple(one for one in report.active if not one.startswith("MainThread"))
    return report.model_copy(update={"active": active})


def settled(recorder: Recorder, condition: Callable[[ThreadReport], object]) -> ThreadReport:
    """The first report that fulfills the condition."""
    deadline = time.monotonic() + 10.0
    while not condition(report := of_others(recorder)):
        assert time.monotonic() < deadline, report
        time.sleep(0.005)
    return report


def started(target: Callable[[], object], name: str = "theirs") -> threading.Thread:
    """A thread that runs `target`."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_waits_without_a_limit_is_passive(recorder: Recorder, release: threading.Event) -> None:
    """Only another thread can wake it. Its context switches do not change while it sleeps."""
    thread = started(release.wait, name="theirs-passive")
    ident = str(thread.ident)
    settled(recorder, lambda report: ident in report.passive)
    time.sleep(0.2)  # it may still be about to sleep
    report = of_others(recorder)
    time.sleep(0.05)
    again = of_others(recorder)
    assert again.passive[ident] == report.passive[ident] > 0
    assert not any("theirs-passive" in one for one in again.active)


@pytest.mark.parametrize("kind", ["limited", "sleeping", "raw"])
def test_every_other_thread_may_act(recorder: Recorder, release: threading.Event, kind: str) -> None:
    """A wait with a limit, a sleep, and a lock of which nobody knows who releases it."""
    lock = threading.Lock()
    lock.acquire()
    targets: dict[str, Callable[[], object]] = {
        "limited": lambda: release.wait(5.0),
        "sleeping": lambda: [time.sleep(0.01) for _ in range(1000) if not release.is_set()],
        "raw": lock.acquire,
    }
    started(targets[kind], name=f"theirs-{kind}")
    settled(recorder, lambda report: any(f"theirs-{kind}" in one for one in report.active))
    lock.release()


def test_an_idle_thread_of_an_executor_is_passive_and_a_busy_one_is_not(
    recorder: Recorder, release: threading.Event
) -> None:
    """It waits for work that another thread of this process has to give it."""
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        ident = str(pool.submit(threading.get_ident).result())
        settled(recorder, lambda report: ident in report.passive)
        pool.submit(release.wait, 10.0)
        settled(recorder, lambda report: any("pool" in one for one in report.active))
        release.set()


def test_our_own_threads_are_left_out(recorder: Recorder, slot: SlotWriter) -> None:
    """The heartbeat sleeps with a limit, and never issues a collective."""
    thread = start_heartbeat(slot, 0.01)
    time.sleep(0.05)
    report = of_others(recorder)
    assert not any(one.startswith(thread.name) for one in report.active)
    assert str(thread.ident) not in report.passive


def test_a_thread_that_runs_other_code_inside_a_wait_may_act(
    recorder: Recorder, release: threading.Event
) -> None:
    """A handle may be made of Python code. Real waits are in `integration/test_collective_records.py`."""
    inside = threading.Barrier(2)

    class Work:
        """A handle whose wait runs Python code."""

        def wait(self) -> bool:
            inside.wait(10)
            return release.wait(10.0)

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    OwnLog(recorder, "grpo_run/vote", world_size=2).issued(4, "allreduce", torch.ones(8), work)
    thread = started(work.wait)
    inside.wait(10)
    assert thread.ident in recorder.waiting
    report = settled(recorder, lambda report: any("theirs" in one for one in report.active))
    assert (report.waiting, report.issued) == ({}, {"grpo_run/vote": 4})


def test_the_code_that_idle_workers_wait_in_is_found() -> None:
    """A line of Python's own source; without it, idle executors would prevent proofs."""
    from concurrent.futures import thread

    assert worker_server._line_of_idle_worker(thread._worker.__code__) > 0  # type: ignore[attr-defined]


def test_the_function_that_runs_a_backward_is_found() -> None:
    """A private function of torch."""
    code = worker_server._backward_code()
    assert code is not None
    assert code.co_name == torch_names.RUN_BACKWARD


def test_the_line_of_the_script_is_in_the_report(recorder: Recorder) -> None:
    """As a sentence names it: the main thread is in this function."""
    found: list[ThreadReport] = []
    go = threading.Event()
    thread = started(lambda: go.wait() and found.append(report_threads(recorder)))
    go.set()
    thread.join()
    assert found[0].at.startswith("test_worker_server.py:")
    assert found[0].at.endswith(" in test_the_line_of_the_script_is_in_the_report")


def test_threads_of_our_own_hinder_no_proof() -> None:
    """A rank with a thread that may act is not deadlocked: modules that start threads for long are known."""
    folder = Path(worker_server.__file__).parent
    starting = [path for path in folder.rglob("*.py") if "threading.Thread(" in path.read_text()]
    names = {".".join(("grpo_run.runtime.rank", *path.relative_to(folder).with_suffix("").parts))
             for path in starting}  # fmt: skip
    assert names - {"grpo_run.runtime.rank.bootstrap"} <= set(worker_server.NEVER_ISSUE_COLLECTIVES)
