"""Small programs that wait, each in its own way: hung for good, until a known time, or for something alive.

Run as `python -m support.waiting_programs NAME [ARGUMENT]`. Each starts a thread like a rank's heartbeat, prints
that thread's native id and the ids of idle library threads in one line, and waits. Used by
`tests/integration/test_wait_states.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import http.client
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

LONG_SECONDS = 100_000.0
SHORT_SECONDS = 40.0
"""Longer than the test looks."""

_PROGRAMS: dict[str, Callable[[], object]] = {}
HUNG: list[str] = []
"""Programs that nothing alive can wake."""
UNTIL_LATER: list[str] = []
"""Programs in which nothing happens before `LONG_SECONDS` have passed."""
UNTIL_SOON: list[str] = []
"""Programs in which nothing happens for at most `SHORT_SECONDS`."""
ALIVE: list[str] = []
"""Programs of which nothing may be proved."""


def _program(names: list[str]) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        names.append(function.__name__)
        _PROGRAMS[function.__name__] = function
        return function

    return add


def _in_thread(function: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _sleeper(seconds: float, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", str(int(seconds))], **options)  # type: ignore[call-overload,no-any-return]


def _fork(child: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    return pid


# hung


@_program(HUNG)
def lock_taken_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@_program(HUNG)
def crossed_locks() -> None:
    one, other = threading.Lock(), threading.Lock()
    one.acquire()

    def cross() -> None:
        with other, one:
            pass

    _in_thread(cross)
    while not other.locked():
        time.sleep(0.01)
    other.acquire()


@_program(HUNG)
def lock_of_an_ended_thread() -> None:
    lock = threading.Lock()
    _in_thread(lock.acquire).join()
    lock.acquire()


@_program(HUNG)
def queue_never_fed() -> None:
    queue.Queue[int]().get()


@_program(HUNG)
def simple_queue_never_fed() -> None:
    queue.SimpleQueue[int]().get()


@_program(HUNG)
def event_never_set() -> None:
    threading.Event().wait()


@_program(HUNG)
def join_of_a_stuck_thread() -> None:
    _in_thread(lock_taken_twice).join()


@_program(HUNG)
def future_never_set() -> None:
    concurrent.futures.Future[int]().result()


@_program(HUNG)
def lock_beside_an_idle_pool_of_threads() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(3)
    list(pool.map(int, range(9)))
    lock_taken_twice()


@_program(HUNG)
def task_of_a_pool_that_waits_for_its_own_pool() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(lambda: pool.submit(int).result()).result()


@_program(HUNG)
def pipe_to_itself() -> None:
    reading, writing = os.pipe()
    os.read(reading, 1)
    os.close(writing)


@_program(HUNG)
def full_pipe_to_itself() -> None:
    _, writing = os.pipe()
    while True:
        os.write(writing, bytes(65536))


@_program(HUNG)
def select_on_its_own_pipe() -> None:
    select.select([os.pipe()[0]], [], [])


@_program(HUNG)
def poll_on_its_own_pipes() -> None:
    poller = select.poll()
    ends = [os.pipe(), os.pipe()]
    for reading, _ in ends:
        poller.register(reading, select.POLLIN)
    poller.poll()


@_program(HUNG)
def socket_pair_to_itself() -> None:
    pair = socket.socketpair()
    pair[0].recv(1)


@_program(HUNG)
def event_loop_with_nothing_due() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    asyncio.run(never())


@_program(HUNG)
def stopped_child() -> None:
    child = _sleeper(LONG_SECONDS)
    os.kill(child.pid, signal.SIGSTOP)
    child.wait()


@_program(HUNG)
def child_with_a_full_pipe() -> None:
    code = "import os\nwhile True: os.write(1, bytes(65536))"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    child.wait()


@_program(HUNG)
def child_that_is_stuck_itself() -> None:
    os.waitpid(_fork(lock_taken_twice), 0)


@_program(ALIVE)
def lock_beside_a_child_at_work() -> None:
    _sleeper(SHORT_SECONDS)
    lock_taken_twice()


@_program(HUNG)
def lock_beside_the_resource_tracker() -> None:
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    lock_taken_twice()


@_program(HUNG)
def lock_beside_tqdms_monitor() -> None:
    lock_taken_twice()


# until a known time


@_program(UNTIL_LATER)
def long_sleep() -> None:
    time.sleep(LONG_SECONDS)


@_program(UNTIL_LATER)
def join_of_a_thread_in_a_long_sleep() -> None:
    _in_thread(long_sleep).join()


@_program(UNTIL_LATER)
def child_in_a_long_sleep() -> None:
    os.waitpid(_fork(long_sleep), 0)


@_program(UNTIL_SOON)
def short_sleep() -> None:
    time.sleep(SHORT_SECONDS)


@_program(UNTIL_SOON)
def queue_that_is_fed_after_a_sleep() -> None:
    items = queue.Queue[int]()
    _in_thread(lambda: (time.sleep(SHORT_SECONDS), items.put(1)))
    items.get()


@_program(UNTIL_SOON)
def pool_with_a_thread_at_work() -> None:
    concurrent.futures.ThreadPoolExecutor(3).submit(short_sleep).result()


@_program(UNTIL_SOON)
def event_loop_with_a_thread() -> None:
    async def work() -> None:
        await asyncio.to_thread(short_sleep)

    asyncio.run(work())


@_program(UNTIL_SOON)
def long_sleep_beside_a_short_one() -> None:
    _in_thread(short_sleep)
    long_sleep()


@_program(UNTIL_SOON)
def socket_pair_held_by_a_child() -> None:
    ours, theirs = socket.socketpair()
    _fork(lambda: (time.sleep(SHORT_SECONDS), theirs.send(b"x")))
    theirs.close()
    ours.recv(1)


# alive


@_program(ALIVE)
def timer() -> None:
    event = threading.Event()
    threading.Timer(SHORT_SECONDS, event.set).start()
    event.wait()


@_program(ALIVE)
def lock_with_a_time_limit() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=SHORT_SECONDS)


@_program(ALIVE)
def busy_thread() -> None:
    def work() -> None:
        while True:
            sum(range(1000))
            time.sleep(0.05)

    _in_thread(work).join()


@_program(ALIVE)
def child_that_sleeps() -> None:
    _sleeper(SHORT_SECONDS).wait()


@_program(ALIVE)
def child_in_its_own_session() -> None:
    _sleeper(SHORT_SECONDS, start_new_session=True).wait()


@_program(ALIVE)
def long_sleep_beside_a_child_at_work() -> None:
    _sleeper(SHORT_SECONDS)
    long_sleep()


@_program(ALIVE)
def output_of_a_child() -> None:
    _sleeper(SHORT_SECONDS, stdout=subprocess.PIPE).communicate()


@_program(ALIVE)
def pipe_held_by_a_daemon() -> None:
    """A grandchild that left the session and whose parent has exited."""
    reading, writing = os.pipe()

    def detach() -> None:
        os.setsid()
        if os.fork() == 0:
            time.sleep(SHORT_SECONDS)

    os.waitpid(_fork(detach), 0)
    os.close(writing)
    os.read(reading, 1)


@_program(UNTIL_SOON)
def process_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [SHORT_SECONDS] * 2)


@_program(ALIVE)
def process_pool_executor() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        pool.submit(subprocess.call, ["sleep", str(int(SHORT_SECONDS))]).result()


@_program(UNTIL_SOON)
def multiprocessing_queue() -> None:
    context = multiprocessing.get_context("fork")
    items = context.Queue()
    context.Process(target=lambda: (time.sleep(SHORT_SECONDS), items.put(1)), daemon=True).start()
    items.get()


@_program(ALIVE)
def multiprocessing_lock() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    lock.acquire()


@_program(ALIVE)
def answer_of_a_server() -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]))
    connection.request("GET", "/")
    connection.getresponse()


@_program(ALIVE)
def answer_of_a_server_with_a_time_limit() -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]), timeout=SHORT_SECONDS)
    connection.request("GET", "/")
    connection.getresponse()


@_program(ALIVE)
def lock_beside_a_thread_that_serves() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _in_thread(listener.accept)
    lock_taken_twice()


@_program(ALIVE)
def receive_timeout_of_the_kernel() -> None:
    pair = socket.socketpair()
    limit = int(SHORT_SECONDS).to_bytes(8, "little") + bytes(8)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    pair[0].recv(1)


@_program(ALIVE)
def listening_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        listener.accept()


def _in_flight(end: int) -> None:
    """Send a descriptor to a child that is busy, close it, and leave nobody else with it."""
    sender, receiver = socket.socketpair()
    socket.send_fds(sender, [b"x"], [end])
    os.close(end)

    def take_later() -> None:
        os.closerange(3, receiver.fileno())  # it holds no other end either
        os.closerange(receiver.fileno() + 1, 1000)
        time.sleep(SHORT_SECONDS)
        os.write(socket.recv_fds(receiver, 1, 1)[1][0], b"x")

    _fork(take_later)
    receiver.close()


@_program(ALIVE)
def socket_in_flight() -> None:
    ours, theirs = socket.socketpair()
    _in_flight(theirs.detach())
    ours.recv(1)


@_program(ALIVE)
def pipe_in_flight() -> None:
    reading, writing = os.pipe()
    _in_flight(writing)
    os.read(reading, 1)


@_program(ALIVE)
def datagrams() -> None:
    pair = socket.socketpair(type=socket.SOCK_DGRAM)
    pair[0].recv(1)


@_program(ALIVE)
def event_loop_that_sleeps() -> None:
    asyncio.run(asyncio.sleep(SHORT_SECONDS))


@_program(ALIVE)
def event_loop_with_a_child() -> None:
    async def work() -> None:
        child = await asyncio.create_subprocess_exec("sleep", str(int(SHORT_SECONDS)))
        await child.wait()

    asyncio.run(work())


@_program(ALIVE)
def alarm() -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(int(SHORT_SECONDS))
    lock_taken_twice()


@_program(ALIVE)
def interval_timer_of_the_profiler() -> None:
    signal.signal(signal.SIGPROF, lambda *_: None)
    lock_taken_twice()


@_program(ALIVE)
def signal_handler_of_the_user() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    lock_taken_twice()


@_program(ALIVE)
def handler_that_a_child_calls_by_exiting() -> None:
    event = threading.Event()
    signal.signal(signal.SIGCHLD, lambda *_: event.set())
    _sleeper(SHORT_SECONDS)
    event.wait()


@_program(ALIVE)
def pause() -> None:
    signal.pause()


@_program(ALIVE)
def wait_for_a_signal() -> None:
    signal.sigwait({signal.SIGUSR2})


@_program(ALIVE)
def lock_of_a_file() -> None:
    with tempfile.NamedTemporaryFile() as file, open(file.name) as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(again, fcntl.LOCK_EX)


@_program(ALIVE)
def named_pipe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/pipe")
        os.open(f"{folder}/pipe", os.O_RDONLY)


@_program(ALIVE)
def named_pipe_that_is_open() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/pipe")
        os.read(os.open(f"{folder}/pipe", os.O_RDWR), 1)


@_program(ALIVE)
def event_descriptor() -> None:
    libc = __import__("ctypes").CDLL(None)
    os.read(libc.eventfd(0, 0), 8)


@_program(ALIVE)
def terminal() -> None:
    leader, follower = os.openpty()
    os.read(follower, 1)
    os.close(leader)


def main() -> None:
    """Run the program named on the command line."""
    name = sys.argv[1]
    if name == "lock_beside_tqdms_monitor":
        import tqdm

        from grpo_run.trainers.rank.idle_threads import idle_threads

        tqdm.tqdm(range(3))
    heart = _in_thread(_beat)
    time.sleep(0.1)
    idle = idle_threads() if name == "lock_beside_tqdms_monitor" else []
    print(heart.native_id, *idle, flush=True)
    sys.stdin.readline()  # all programs begin together: some of them last `SHORT_SECONDS`
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(BrokenPipeError):
        _PROGRAMS[name]()


def _beat() -> None:
    event = threading.Event()
    while True:
        event.wait(1.0)


if __name__ == "__main__":
    main()
