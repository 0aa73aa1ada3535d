"""A plain TRL GRPO script whose reward function waits on rank 1, at each step in another legitimate way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import http.server
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tiny
from trl import GRPOConfig, GRPOTrainer

SECONDS = 9.0
"""Longer than the watchdog needs for a proof."""


def child() -> None:
    subprocess.run(["sleep", str(SECONDS)], check=True)


def child_in_its_own_session() -> None:
    subprocess.Popen(["sleep", str(SECONDS)], start_new_session=True).wait()


def output_of_a_child() -> None:
    subprocess.run(
        [sys.executable, "-c", f"import time; time.sleep({SECONDS})"], capture_output=True, check=True
    )


def answer_of_a_server() -> None:
    code = (
        "import socket, time\n"
        "server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1], flush=True)\n"
        f"one = server.accept()[0]; one.recv(9999); time.sleep({SECONDS})\n"
        "one.sendall(b'HTTP/1.0 200 OK\\r\\n\\r\\n')"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    connection = http.client.HTTPConnection("127.0.0.1", int(server.stdout.readline()))
    connection.request("GET", "/")
    connection.getresponse().read()
    server.wait()


def server_of_its_own() -> None:
    event = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            event.set()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = f"import time, urllib.request; time.sleep({SECONDS}); urllib.request.urlopen('http://127.0.0.1:{server.server_port}')"
    caller = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    event.wait()
    caller.wait()
    server.shutdown()


def event_loop() -> None:
    asyncio.run(asyncio.sleep(SECONDS))


def event_loop_with_a_thread() -> None:
    asyncio.run(asyncio.to_thread(time.sleep, SECONDS))


def event_loop_with_a_child() -> None:
    async def work() -> None:
        await (await asyncio.create_subprocess_exec("sleep", str(SECONDS))).wait()

    asyncio.run(work())


def timer() -> None:
    event = threading.Event()
    threading.Timer(SECONDS, event.set).start()
    event.wait()


def fed_queue() -> None:
    items = queue.Queue[int]()
    threading.Thread(target=lambda: (time.sleep(SECONDS), items.put(1)), daemon=True).start()
    items.get()


def pool_of_threads() -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(time.sleep, [1.0, SECONDS]))


def pool_of_processes() -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(time.sleep, [1.0, SECONDS])


def queue_of_a_process() -> None:
    context = multiprocessing.get_context("fork")
    items = context.Queue()
    process = context.Process(target=lambda: (time.sleep(SECONDS), items.put(1)))
    process.start()
    items.get()
    process.join()


def event_of_a_process() -> None:
    context = multiprocessing.get_context("fork")
    event = context.Event()
    process = context.Process(target=lambda: (time.sleep(SECONDS), event.set()))
    process.start()
    event.wait()
    process.join()


def socket_pair() -> None:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        time.sleep(SECONDS)
        theirs.send(b"x")
        os._exit(0)
    theirs.close()
    ours.recv(1)
    os.wait()


def receive_timeout_in_the_kernel() -> None:
    ours, _theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, int(SECONDS).to_bytes(8, "little") + bytes(8))
    with contextlib.suppress(BlockingIOError):
        ours.recv(1)


def alarm() -> None:
    event = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: event.set())
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    event.wait()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def signal_of_a_child(number: int) -> None:
    event = threading.Event()
    before = signal.signal(number, lambda *_: event.set())
    subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -{number} {os.getpid()}"])
    event.wait()
    signal.signal(number, before)
    os.wait()


def own_signal_of_a_child() -> None:
    signal_of_a_child(signal.SIGUSR1)


def interrupt_of_a_child() -> None:
    signal_of_a_child(signal.SIGINT)


def handler_of_exits() -> None:
    event = threading.Event()
    before = signal.signal(signal.SIGCHLD, lambda *_: event.set())
    process = subprocess.Popen(["sleep", str(SECONDS)])
    event.wait()
    signal.signal(signal.SIGCHLD, before)
    process.wait()


def busy_thread() -> None:
    def work() -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            sum(range(10_000))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def named_pipe() -> None:
    path = f"pipe-{os.getpid()}"
    os.mkfifo(path)
    subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; echo x > {path}"], start_new_session=True)
    with open(path) as pipe:
        pipe.read()
    os.wait()


WAYS: tuple[Callable[[], None], ...] = (
    receive_timeout_in_the_kernel, interrupt_of_a_child, child, child_in_its_own_session, output_of_a_child,
    answer_of_a_server, server_of_its_own, event_loop,
    event_loop_with_a_thread, event_loop_with_a_child, timer, fed_queue, pool_of_threads, pool_of_processes,
    queue_of_a_process, event_of_a_process, socket_pair, alarm, own_signal_of_a_child,
    handler_of_exits, busy_thread, named_pipe,
)  # fmt: skip


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    arguments = parser.parse_args()
    arguments.max_steps = len(WAYS)
    tiny.use_test_shims()
    rank = int(os.environ["RANK"])
    ways = iter(WAYS)
    reward = tiny.rewards(0.0)

    def rewards(**values: Any) -> Any:
        if rank == 1:
            way = next(ways, None)
            if way is not None:
                print(f"waits: {way.__name__}", flush=True)
                way()
        return reward(**values)

    tokenizer = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=rewards,
        args=GRPOConfig(**{**tiny.settings(arguments), **tiny.rollout_settings(arguments)}),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=tiny.callbacks(arguments),
    )
    tiny.train(trainer, arguments)


if __name__ == "__main__":
    main()
