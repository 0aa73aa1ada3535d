"""Programs in which nothing happens until a known time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import queue
import time

from support.waiting_programs.registry import (
    LONG_SECONDS,
    SHORT_SECONDS,
    UNTIL_LATER,
    UNTIL_SOON,
    fork,
    in_thread,
    program,
)


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
