"""Torch's worker server, which serves the Flight Recorder from C++ threads even while Python is stuck, and
reports of the rank's threads while Python runs.

Started by the session when `torch.distributed` is imported;
`runtime/supervisor/detection/_collective_records.py` is its client. The watchdog asks for a report of the
threads when the collective records alone would prove a
deadlock: it says which threads wait in collectives, and which may still act. Does not judge.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from grpo_run.runtime.rank.collective_recorder import Recorder
from grpo_run.runtime.upstream import process_names, torch_names
from grpo_run.watchdog.deadlocks.positions import THREADS_HANDLER, ThreadReport
from grpo_run.watchdog.evidence.source import is_user_file
from grpo_run.watchdog.verdict import Location

NEVER_ISSUE_COLLECTIVES = (
    "grpo_run.runtime.rank.heartbeat",
    "grpo_run.runtime.rank.session",
    "grpo_run.runtime.rank.saving.copies",
    "grpo_run.runtime.rank.saving.snapshots",
    "tensorboard.",
    "torch._inductor.",
    "torch.utils.data.",
    "tqdm.",
    "wandb.",
)
"""Modules whose threads call no code of the script: our own, progress bars, loggers and data loaders."""


def start_worker_server(path: str) -> Any:
    """Start the worker server on a unix socket and return it. The caller must keep the returned object.

    The server prints a warning when it starts, which is suppressed because it does not concern the user.

    Raises:
        RuntimeError: the server cannot listen on `path`.
    """
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        return getattr(torch_names.distributed_c10d(), torch_names.WORKER_SERVER)(path)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def serve_thread_reports(recorder: Recorder) -> None:
    """Let the worker server answer with reports of this rank's threads. Call it once per process."""
    handler = functools.partial(_answer, recorder)
    getattr(torch_names.distributed_c10d(), torch_names.REGISTER_HANDLER)(THREADS_HANDLER, handler)


def _answer(recorder: Recorder, request: Any, response: Any) -> None:
    try:
        text, status = report_threads(recorder).model_dump_json(), 200
    except Exception as error:  # noqa: BLE001 - an exception must not reach torch's server thread
        text, status = f"{type(error).__name__}: {error}", 500
    response.set_content(text, "application/json")
    response.set_status(status)


def report_threads(recorder: Recorder) -> ThreadReport:
    """Return a report on all threads but the calling one."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    waiting: list[int] = []
    passive: list[int] = []
    active: list[str] = []
    in_backward = False
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    # nothing in this loop may release the interpreter's lock
    for ident, frame in frames.items():
        thread = threads.get(ident)
        if ident in recorder.waiting and frame.f_code in recorder.wait_codes:
            waiting.append(ident)
        elif ident == main and ident in recorder.in_backward and frame.f_code is _backward_code():
            in_backward = True
        elif thread is not None and ident != main and _is_passive(frame):
            passive.append(ident)
        elif thread is None or not _module(thread).startswith(NEVER_ISSUE_COLLECTIVES):
            active.append(f"{thread.name if thread else 'a thread'} at {_place(frame)}")
    active += [
        f"{thread.name} is starting"
        for ident, thread in threads.items()
        if ident not in frames and ident != threading.get_ident() and thread.is_alive()
    ]

    def switches(idents: list[int]) -> dict[str, int]:
        return {
            str(ident): _context_switches(_native_id(threads.get(ident), ident == main)) for ident in idents
        }

    return ThreadReport(
        waiting=switches(waiting),
        passive=switches(passive),
        active=tuple(active),
        in_backward=_context_switches(os.getpid()) if in_backward else None,
        issued=recorder.issued(),
        uses_futures=recorder.uses_futures,
        at=_line_of_script(frames.get(main)) if main is not None else "",
    )


def _line_of_script(frame: FrameType | None) -> str:
    """Where a thread is in the script; empty if it is not in it."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return (
        ""
        if frame is None
        else Location(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name).short
    )


def _is_passive(frame: FrameType) -> bool:
    """Whether a thread waits for another thread of this process, without a time limit."""
    if frame.f_code is threading.Condition.wait.__code__:
        return frame.f_locals.get("timeout", 0.0) is None
    executor = sys.modules.get("concurrent.futures.thread")
    worker: CodeType | None = executor._worker.__code__ if executor is not None else None
    return frame.f_code is worker and frame.f_lineno == _line_of_idle_worker(frame.f_code)


@functools.cache
def _line_of_idle_worker(code: CodeType) -> int:
    """The line at which an idle thread of a `ThreadPoolExecutor` waits for work; 0 if it is not found."""
    for _, _, line in code.co_lines():
        if line and process_names.IDLE_WORKER in linecache.getline(code.co_filename, line):
            return line
    return 0


def _backward_code() -> CodeType | None:
    """The function of torch from which Python enters autograd's engine; None before torch is imported."""
    module = sys.modules.get("torch.autograd.graph")
    function: Callable[..., Any] | None = getattr(module, torch_names.RUN_BACKWARD, None)
    return function.__code__ if function is not None else None


def _module(thread: threading.Thread) -> str:
    """The module of the function that a thread runs, or of its class."""
    own = type(thread).__module__
    if own != "threading":
        return own
    return getattr(getattr(thread, process_names.THREAD_TARGET, None), "__module__", None) or ""


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _native_id(thread: threading.Thread | None, is_main: bool) -> int:
    if is_main:
        return os.getpid()
    return thread.native_id or 0 if thread is not None else 0


def _context_switches(native_id: int) -> int:
    """How often the kernel has switched away from a thread; -1 if it cannot be read."""
    try:
        with open(f"/proc/self/task/{native_id}/status", "rb") as file:
            lines = [line.split(b":") for line in file if b"ctxt_switches" in line]
    except OSError:
        return -1
    return sum(int(count) for _, count in lines)
