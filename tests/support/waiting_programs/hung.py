"""Programs that nothing alive can wake, or in which nothing happens until a known time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import queue
import signal
import threading
import time

from support.waiting_programs.registry import (
    HUNG,
    LONG_SECONDS,
    SHORT_SECONDS,
    UNTIL_LATER,
    UNTIL_SOON,
    fork,
    in_thread,
    program,
    sleeper,
)


@program(HUNG)
def lock_taken_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@program(HUNG)
def crossed_locks() -> None:
    one, other = threading.Lock(), threading.Lock()
    one.acquire()

    def cross() -> None:
        with other, one:
            pass

    in_thread(cross)
    while not other.locked():
        time.sleep(0.01)
    other.acquire()


@program(HUNG)
def lock_of_an_ended_thread() -> None:
    lock = threading.Lock()
    in_thread(lock.acquire).join()
    lock.acquire()


@program(HUNG)
def queue_never_fed() -> None:
    queue.Queue[int]().get()


@program(HUNG)
def simple_queue_never_fed() -> None:
    queue.SimpleQueue[int]().get()


@program(HUNG)
def event_never_set() -> None:
    threading.Event().wait()


@program(HUNG)
def join_of_a_stuck_thread() -> None:
    in_thread(lock_taken_twice).join()


@program(HUNG)
def future_never_set() -> None:
    concurrent.futures.Future[int]().result()


@program(HUNG)
def lock_beside_an_idle_pool_of_threads() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(3)
    list(pool.map(int, range(9)))
    lock_taken_twice()


@program(HUNG)
def task_of_a_pool_that_waits_for_its_own_pool() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(lambda: pool.submit(int).result()).result()


@program(HUNG)
def stopped_child() -> None:
    child = sleeper(LONG_SECONDS)
    os.kill(child.pid, signal.SIGSTOP)
    child.wait()


@program(HUNG)
def child_that_is_stuck_itself() -> None:
    os.waitpid(fork(lock_taken_twice), 0)


@program(HUNG)
def lock_beside_the_resource_tracker() -> None:
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    lock_taken_twice()


@program(HUNG)
def lock_beside_tqdms_monitor() -> None:
    lock_taken_twice()


@program(UNTIL_LATER)
def long_sleep() -> None:
    time.sleep(LONG_SECONDS)


@program(UNTIL_LATER)
def join_of_a_thread_in_a_long_sleep() -> None:
    in_thread(long_sleep).join()


@program(UNTIL_LATER)
def child_in_a_long_sleep() -> None:
    os.waitpid(fork(long_sleep), 0)


@program(UNTIL_SOON)
def short_sleep() -> None:
    time.sleep(SHORT_SECONDS)


@program(UNTIL_SOON)
def queue_that_is_fed_after_a_sleep() -> None:
    items = queue.Queue[int]()
    in_thread(lambda: (time.sleep(SHORT_SECONDS), items.put(1)))
    items.get()


@program(UNTIL_SOON)
def pool_with_a_thread_at_work() -> None:
    concurrent.futures.ThreadPoolExecutor(3).submit(short_sleep).result()


@program(UNTIL_SOON)
def event_loop_with_a_thread() -> None:
    async def work() -> None:
        await asyncio.to_thread(short_sleep)

    asyncio.run(work())


@program(UNTIL_SOON)
def long_sleep_beside_a_short_one() -> None:
    in_thread(short_sleep)
    long_sleep()


@program(UNTIL_SOON)
def process_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [SHORT_SECONDS] * 2)


@program(UNTIL_SOON)
def multiprocessing_queue() -> None:
    context = multiprocessing.get_context("fork")
    items = context.Queue()
    context.Process(target=lambda: (time.sleep(SHORT_SECONDS), items.put(1)), daemon=True).start()
    items.get()
