"""Programs that something alive may wake: nothing may be proved of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import http.client
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from support.waiting_programs.hung import lock_taken_twice, long_sleep
from support.waiting_programs.registry import ALIVE, SHORT_SECONDS, in_thread, program, sleeper


@program(ALIVE)
def timer() -> None:
    event = threading.Event()
    threading.Timer(SHORT_SECONDS, event.set).start()
    event.wait()


@program(ALIVE)
def lock_with_a_time_limit() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=SHORT_SECONDS)


@program(ALIVE)
def busy_thread() -> None:
    def work() -> None:
        while True:
            sum(range(1000))
            time.sleep(0.05)

    in_thread(work).join()


@program(ALIVE)
def child_that_sleeps() -> None:
    sleeper(SHORT_SECONDS).wait()


@program(ALIVE)
def child_in_its_own_session() -> None:
    sleeper(SHORT_SECONDS, start_new_session=True).wait()


@program(ALIVE)
def long_sleep_beside_a_child_at_work() -> None:
    sleeper(SHORT_SECONDS)
    long_sleep()


@program(ALIVE)
def output_of_a_child() -> None:
    sleeper(SHORT_SECONDS, stdout=subprocess.PIPE).communicate()


@program(ALIVE)
def process_pool_executor() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        pool.submit(subprocess.call, ["sleep", str(int(SHORT_SECONDS))]).result()


@program(ALIVE)
def multiprocessing_lock() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    lock.acquire()


@program(ALIVE)
def answer_of_a_server() -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]))
    connection.request("GET", "/")
    connection.getresponse()


@program(ALIVE)
def answer_of_a_server_with_a_time_limit() -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]), timeout=SHORT_SECONDS)
    connection.request("GET", "/")
    connection.getresponse()


@program(ALIVE)
def lock_beside_a_thread_that_serves() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    in_thread(listener.accept)
    lock_taken_twice()


@program(ALIVE)
def listening_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        listener.accept()


@program(ALIVE)
def event_loop_that_sleeps() -> None:
    asyncio.run(asyncio.sleep(SHORT_SECONDS))


@program(ALIVE)
def event_loop_with_a_child() -> None:
    async def work() -> None:
        child = await asyncio.create_subprocess_exec("sleep", str(int(SHORT_SECONDS)))
        await child.wait()

    asyncio.run(work())


@program(ALIVE)
def alarm() -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(int(SHORT_SECONDS))
    lock_taken_twice()


@program(ALIVE)
def interval_timer_of_the_profiler() -> None:
    signal.signal(signal.SIGPROF, lambda *_: None)
    lock_taken_twice()


@program(ALIVE)
def signal_handler_of_the_user() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    lock_taken_twice()


@program(ALIVE)
def handler_that_a_child_calls_by_exiting() -> None:
    event = threading.Event()
    signal.signal(signal.SIGCHLD, lambda *_: event.set())
    sleeper(SHORT_SECONDS)
    event.wait()


@program(ALIVE)
def pause() -> None:
    signal.pause()


@program(ALIVE)
def wait_for_a_signal() -> None:
    signal.sigwait({signal.SIGUSR2})


@program(ALIVE)
def lock_of_a_file() -> None:
    with tempfile.NamedTemporaryFile() as file, open(file.name) as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(again, fcntl.LOCK_EX)


@program(ALIVE)
def named_pipe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/pipe")
        os.open(f"{folder}/pipe", os.O_RDONLY)


@program(ALIVE)
def lock_beside_a_child_at_work() -> None:
    sleeper(SHORT_SECONDS)
    lock_taken_twice()


@program(ALIVE)
def event_descriptor() -> None:
    descriptor = os.eventfd(0)
    threading.Timer(SHORT_SECONDS, os.eventfd_write, (descriptor, 1)).start()
    os.eventfd_read(descriptor)


@program(ALIVE)
def descriptor_of_a_child() -> None:
    watching = select.poll()
    watching.register(os.pidfd_open(sleeper(SHORT_SECONDS).pid), select.POLLIN)
    watching.poll()


@program(ALIVE)
def socket_in_flight() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = socket.socketpair()
    socket.send_fds(sender, [b"x"], [theirs.fileno()])
    theirs.close()
    threading.Timer(SHORT_SECONDS, socket.recv_fds, (receiver, 1, 1)).start()
    ours.recv(1)


@program(ALIVE)
def child_whose_output_nobody_reads_yet() -> None:
    child = subprocess.Popen(["head", "-c", "200000", "/dev/zero"], stdout=subprocess.PIPE)
    threading.Timer(SHORT_SECONDS, child.communicate).start()
    child.wait()
