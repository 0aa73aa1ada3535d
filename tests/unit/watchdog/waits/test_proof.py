"""The proof that nothing can wake a rank: who counts as alive, and that nothing unknown is ever proof."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.watchdog.waits.looks import UNKNOWN, Process, RankLook, Wait, WaitingThread, WaitKind
from grpo_run.watchdog.waits.proof import prove_stuck

RANK, CHILD, GRANDCHILD = 100, 200, 300
FUTEX = Wait(kind=WaitKind.futex, call="futex")
TIMED = Wait(kind=WaitKind.timed, call="futex", timeout_seconds=math.nan)
FOR_CHILD = Wait(kind=WaitKind.child, call="wait4", child=CHILD)
PIPE = Wait(kind=WaitKind.descriptors, call="epoll_wait")
STOPPED = Wait(kind=WaitKind.stopped)


def thread(tid: int, wait: Wait, name: str = "python", state: str = "S", switches: int = 7) -> WaitingThread:
    """One thread."""
    return WaitingThread(tid=tid, name=name, state=state, switches=switches, wait=wait)


def process(pid: int, *threads: WaitingThread, parent: int = RANK, **facts: object) -> Process:
    """One process; a child of the rank unless it is the rank."""
    return Process(pid=pid, parent=parent if pid != RANK else 1, threads=threads, **facts)  # type: ignore[arg-type]


def rank(*processes: Process, idle: frozenset[int] = frozenset()) -> RankLook:
    """A look at a rank."""
    return RankLook(pid=RANK, processes={one.pid: one for one in processes}, idle_threads=idle)


def stuck(look: RankLook, before: RankLook | None = None) -> bool:
    """Whether two looks prove that the rank is stuck for ever."""
    found = prove_stuck(before or look, look)
    return found is not None and math.isinf(found.until_seconds)


def test_a_futex_of_a_process_in_which_nothing_else_runs_is_proof() -> None:
    """A lock taken twice; also two threads that wait for each other."""
    assert stuck(rank(process(RANK, thread(RANK, FUTEX))))
    assert stuck(rank(process(RANK, thread(RANK, FUTEX), thread(101, FUTEX))))


@pytest.mark.parametrize(
    "other",
    [
        thread(101, TIMED),
        thread(101, UNKNOWN),
        thread(101, UNKNOWN, state="R"),
        thread(101, FUTEX, state="R"),
        thread(101, FUTEX, state="D"),
        thread(101, FUTEX, state="t"),
        thread(101, PIPE),
        thread(101, Wait(kind=WaitKind.accept, call="accept4")),
        thread(101, Wait(kind=WaitKind.child, call="wait4")),
        thread(101, Wait(kind=WaitKind.timed, call="epoll_wait", timeout_seconds=0.01)),
        thread(101, Wait(kind=WaitKind.timed, call="epoll_wait", timeout_seconds=5.0), name="gloo_tcp_loop"),
        thread(101, TIMED, name="pt_gloo_runloop"),
    ],
)
def test_a_thread_that_may_act_prevents_the_proof(other: WaitingThread) -> None:
    """It may release the lock."""
    assert not stuck(rank(process(RANK, thread(RANK, FUTEX), other)))


def test_a_thread_that_ran_between_the_looks_prevents_the_proof() -> None:
    """Even if it waits for the same thing again; the same holds for a thread that is new."""
    look = rank(process(RANK, thread(RANK, FUTEX), thread(101, FUTEX)))
    ran = rank(process(RANK, thread(RANK, FUTEX), thread(101, FUTEX, switches=8)))
    new = rank(process(RANK, thread(RANK, FUTEX)))
    assert not stuck(look, before=ran)
    assert not stuck(look, before=new)


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("gloo_tcp_loop", Wait(kind=WaitKind.timed, call="epoll_wait", timeout_seconds=0.01)),
        ("pt_workerserver", Wait(kind=WaitKind.accept, call="accept4")),
        ("pt_workerserver", FUTEX),
        ("jemalloc_bg_thd", TIMED),
        ("pt_tcpstore_uv", Wait(kind=WaitKind.descriptors, call="epoll_pwait")),
    ],
)
def test_an_idle_thread_of_a_library_does_not_prevent_the_proof(name: str, wait: Wait) -> None:
    """It is scheduled all the time, and wakes nobody."""
    before = rank(process(RANK, thread(RANK, FUTEX), thread(101, wait, name)))
    look = rank(process(RANK, thread(RANK, FUTEX), thread(101, wait, name, switches=900)))
    assert stuck(look, before=before)


def test_a_thread_that_the_rank_published_as_idle_does_not_prevent_the_proof() -> None:
    """Its own heartbeat, and tqdm's monitor; the main thread is never one of them."""
    threads = (thread(RANK, FUTEX), thread(101, TIMED))
    assert stuck(rank(process(RANK, *threads), idle=frozenset({101})))
    assert not stuck(rank(process(RANK, *threads), idle=frozenset({102})))
    assert not stuck(rank(process(RANK, thread(RANK, TIMED)), idle=frozenset({RANK})))
    # published in both looks, or not at all
    look = rank(process(RANK, *threads), idle=frozenset({101}))
    assert not stuck(look, before=replace(look, idle_threads=frozenset()))
    assert not stuck(replace(look, idle_threads=frozenset()), before=look)


@pytest.mark.parametrize("child", [50, CHILD])
def test_what_a_rank_publishes_is_about_its_own_threads(child: int) -> None:
    """A thread of another process with a published number may act, whichever number was given out first."""
    waiting = process(RANK, thread(RANK, replace(FOR_CHILD, child=child)))
    other = process(child, thread(child, FUTEX), thread(child + 1, TIMED))
    assert not stuck(rank(waiting, other, idle=frozenset({child + 1})))
    handles = process(RANK, thread(RANK, FUTEX), caught_signals=frozenset({signal.SIGCHLD}))
    assert not stuck(rank(handles, other, idle=frozenset({child + 1})))


def test_a_thread_that_has_exited_does_nothing() -> None:
    """And says nothing about the threads after it."""
    ended = thread(101, Wait(kind=WaitKind.ended), state="Z")
    assert stuck(rank(process(RANK, thread(RANK, FUTEX), ended)))
    assert not stuck(rank(process(RANK, ended, thread(RANK, FUTEX), thread(102, TIMED))))


@pytest.mark.parametrize(
    "handled", [signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR1, signal.SIGIO, 31, 34, 40]
)
def test_a_signal_handler_prevents_the_proof(handled: int) -> None:
    """`signal.alarm` shows nowhere else."""
    facts = {"caught_signals": frozenset({signal.SIGINT, handled})}
    assert not stuck(rank(process(RANK, thread(RANK, FUTEX), **facts)))


def test_handlers_of_errors_and_requests_to_end_do_not_prevent_the_proof() -> None:
    """Python, faulthandler and the C library (32 and 33) install them."""
    handled = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, 32, 33})
    assert stuck(rank(process(RANK, thread(RANK, FUTEX), caught_signals=handled)))


def test_a_timer_prevents_the_proof() -> None:
    """A POSIX timer sends a signal or starts a thread."""
    assert not stuck(rank(process(RANK, thread(RANK, FUTEX), has_timers=True)))


def test_a_process_that_cannot_be_read_may_do_anything() -> None:
    """The rank itself; a child matters if the rank waits for it."""
    unreadable = Process(pid=CHILD, parent=RANK, threads=None)
    assert not stuck(rank(Process(pid=RANK, parent=1, threads=None)))
    assert not stuck(rank(process(RANK, thread(RANK, FOR_CHILD)), unreadable))


@pytest.mark.parametrize("handled", [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD])
def test_a_process_at_work_may_send_a_signal_to_the_rank(handled: int) -> None:
    """Its exit runs a handler, or it interrupts the rank after a time. A private futex it cannot wake."""
    working = process(CHILD, thread(CHILD, UNKNOWN, state="R"))
    caught = frozenset({handled})
    assert not stuck(rank(process(RANK, thread(RANK, FUTEX), caught_signals=caught), working))
    assert stuck(rank(process(RANK, thread(RANK, FUTEX)), working))
    helper = replace(working, helper=True)
    assert stuck(rank(process(RANK, thread(RANK, FUTEX), caught_signals=caught), helper))
    assert not stuck(rank(process(RANK, thread(RANK, FOR_CHILD)), helper))


def test_an_idle_worker_of_a_data_loader_does_not_exit_by_itself() -> None:
    """It does not raise SIGCHLD; but it may still answer on the pipes that it holds.

    Its number may be lower than the rank's: numbers start again.
    """
    idle = Wait(kind=WaitKind.timed, call="poll", timeout_seconds=5.0)
    handled = frozenset({signal.SIGCHLD})
    for pid in (CHILD, 50):
        worker = process(pid, thread(pid, idle, "pt_data_worker"))
        assert stuck(rank(process(RANK, thread(RANK, FUTEX), caught_signals=handled), worker))
        assert not stuck(rank(process(RANK, thread(RANK, replace(FOR_CHILD, child=pid))), worker))


def test_a_wait_for_a_stuck_child_is_proof() -> None:
    """A child that is stuck itself, also through a child of its own."""
    child = process(CHILD, thread(CHILD, Wait(kind=WaitKind.child, call="wait4")))
    grandchild = process(GRANDCHILD, thread(GRANDCHILD, FUTEX), parent=CHILD)
    busy = process(GRANDCHILD, thread(GRANDCHILD, TIMED), parent=CHILD)
    waiting = process(RANK, thread(RANK, FOR_CHILD))
    assert stuck(rank(waiting, child, grandchild))
    assert not stuck(rank(waiting, child, busy))
    assert not stuck(rank(waiting, child))  # what does the child wait for?
    beside = process(201, thread(201, TIMED))
    assert stuck(rank(waiting, child, grandchild, beside))


def test_a_wait_for_one_child_does_not_depend_on_another() -> None:
    """If the process ids mean the same to both; a wait for any child depends on all."""
    child = process(CHILD, thread(CHILD, FUTEX))
    other = process(201, thread(201, TIMED))
    any_child = Wait(kind=WaitKind.child, call="wait4")
    assert stuck(rank(process(RANK, thread(RANK, FOR_CHILD)), child, other))
    assert not stuck(rank(process(RANK, thread(RANK, any_child)), child, other))


def test_a_process_at_work_below_a_stuck_child_ends_no_wait_for_children() -> None:
    """Its end is seen by its own parent only, which waits for something else."""
    any_child = Wait(kind=WaitKind.child, call="wait4")
    child = process(CHILD, thread(CHILD, FUTEX))
    busy = process(GRANDCHILD, thread(GRANDCHILD, TIMED), parent=CHILD)
    assert stuck(rank(process(RANK, thread(RANK, any_child)), child, busy))


def test_a_stopped_child_is_named_as_such() -> None:
    """It may be continued from outside, so the caller waits longer; a process at work may continue it too."""
    child = process(CHILD, thread(CHILD, STOPPED, state="T"))
    look = rank(process(RANK, thread(RANK, FOR_CHILD)), child)
    found = prove_stuck(look, look)
    assert found is not None
    assert found.by_stop
    working = process(201, thread(201, TIMED))
    assert not stuck(rank(*look.processes.values(), working))


def test_a_sleep_ends_at_a_known_time() -> None:
    """The earliest of all sleeps counts, and nothing else may run beside it."""
    sleep = Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=5000.0)
    sooner = replace(sleep, until_seconds=600.0)
    for look in (
        rank(process(RANK, thread(RANK, sleep), thread(101, sooner))),
        rank(process(RANK, thread(RANK, FUTEX), thread(101, sooner))),
        rank(process(RANK, thread(RANK, FOR_CHILD)), process(CHILD, thread(CHILD, sooner))),
    ):
        found = prove_stuck(look, look)
        assert found is not None
        assert found.until_seconds == 600.0
        assert not found.by_stop
    busy = process(CHILD, thread(CHILD, TIMED))
    look = rank(process(RANK, thread(RANK, sleep)), busy)
    assert prove_stuck(look, look) is None


CLOSED = st.sampled_from([FUTEX, Wait(kind=WaitKind.child, call="wait4"), STOPPED, FOR_CHILD])
OPEN = st.sampled_from([UNKNOWN, TIMED, PIPE, Wait(kind=WaitKind.accept, call="accept4")])


@st.composite
def looks(draw: st.DrawFn) -> RankLook:
    """A rank with up to three processes, whose threads wait for one another in any way."""
    pids = [RANK, CHILD, GRANDCHILD][: draw(st.integers(1, 3))]
    processes = {}
    for index, pid in enumerate(pids):
        waits = draw(st.lists(CLOSED, min_size=1, max_size=3))
        threads = tuple(
            thread(pid + number, wait, state="T" if wait is STOPPED else "S")
            for number, wait in enumerate(waits)
        )
        caught = draw(st.sampled_from([frozenset(), frozenset({signal.SIGCHLD})]))
        parent = draw(st.sampled_from(pids[:index])) if index else 1
        processes[pid] = Process(pid=pid, parent=parent, threads=threads, caught_signals=caught)
    return RankLook(pid=RANK, processes=processes)


@given(look=looks(), unknown=OPEN)
def test_an_unknown_thread_of_the_rank_never_yields_a_proof(look: RankLook, unknown: Wait) -> None:
    """Whatever all other threads wait for."""
    own = look.processes[RANK]
    threads = (*(own.threads or ()), thread(199, unknown))
    spoilt = replace(look, processes={**look.processes, RANK: replace(own, threads=threads)})
    assert prove_stuck(spoilt, spoilt) is None


@given(look=looks(), unknown=OPEN)
def test_an_unknown_process_never_yields_a_proof_if_the_rank_depends_on_it(
    look: RankLook, unknown: Wait
) -> None:
    """The rank's main thread waits for a child in which something is unknown, or that cannot be read."""
    own = look.processes[RANK]
    threads = (thread(RANK, FOR_CHILD), *(own.threads or ())[1:])
    for child in (
        Process(pid=CHILD, parent=RANK, threads=None),
        process(CHILD, thread(CHILD, unknown)),
        process(CHILD, thread(CHILD, FUTEX), thread(201, unknown)),
    ):
        spoilt = replace(
            look, processes={**look.processes, RANK: replace(own, threads=threads), CHILD: child}
        )
        assert prove_stuck(spoilt, spoilt) is None


@given(look=looks())
def test_a_thread_that_ran_between_two_looks_ends_every_proof(look: RankLook) -> None:
    """Whatever the others wait for."""
    own = look.processes[RANK]
    moved = tuple(replace(one, switches=one.switches + 1) for one in own.threads or ())
    after = replace(look, processes={**look.processes, RANK: replace(own, threads=moved)})
    assert prove_stuck(look, after) is None
