"""A worker: runs reward functions of one rank, one call at a time, in a process that may be killed.

Forked by a keeper. It sees no accelerator. The function runs in its main thread, so timeouts by SIGALRM work
as in a script. After each call the function is pickled again: one that has changed what it holds must stay in
the rank. Does not limit its own time or memory; the rank does.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

from grpo_run.runtime.features.reward_workers import _packing as packing
from grpo_run.runtime.features.reward_workers._messages import Failure, Reply, Task, receive, send, send_beat
from grpo_run.runtime.features.reward_workers.events import FailureKind
from grpo_run.runtime.rank.generators import read_generators, write_generators
from grpo_run.watchdog.causes import is_expired_limit

RECORDED = ("log_extra", "log_metric")
"""Arguments that are the rank's own functions: calls of them are recorded here and made in the rank."""
NOT_COLUMNS = frozenset({"trainer_state", *RECORDED})
USES_GROUP = "uses torch's process group"
HEARTBEAT_SECONDS = 1.0
MAX_TRACEBACK_CHARACTERS = 16 * 1024


def work(tasks: socket.socket) -> NoReturn:
    """Run the tasks that arrive through a channel until the rank closes it."""
    beating = _Heartbeat(tasks)
    _refuse_process_group()
    # a function may start processes that look up its helpers by name; they must not run a script again
    sys.modules["__main__"] = types.ModuleType("__main__")
    faulthandler.enable()  # a crash shows its line in the rank's output
    worker = _Worker()
    process = os.getpid()
    while (message := receive(tasks)) is not None:
        with beating:
            reply = worker.run(pickle.loads(message.content))
        if os.getpid() != process:
            os._exit(0)  # forked by the function, and returned from it
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        send(tasks, _pickled(reply))
    os._exit(0)


class _Heartbeat:
    """Sends a beat about once per second inside its block, as long as a thread of this interpreter gets to
    run.

    Between two calls its thread waits without a time limit: the hang detector proves that a rank is stuck
    only if all threads of its processes are.

    Args:
        tasks: the channel to the rank.
    """

    def __init__(self, tasks: socket.socket) -> None:
        self._tasks = tasks
        self._calling = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="grpo-run-heartbeat").start()

    def __enter__(self) -> None:
        send_beat(self._tasks)
        self._calling.set()

    def __exit__(self, *exception: object) -> None:
        self._calling.clear()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the rank has closed the channel
            while True:
                self._calling.wait()
                send_beat(self._tasks)
                time.sleep(HEARTBEAT_SECONDS)


class _Worker:
    def __init__(self) -> None:
        self._functions: dict[int, tuple[Any, bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, task: Task) -> Reply:
        records: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        try:
            function, before = self._function(task)
            arguments = pickle.loads(task.arguments)
        except (Exception, ProcessGroupUsedError) as error:  # noqa: BLE001 - loading imports libraries
            return Reply(stays=f"cannot be loaded in another process ({_line(error)})")
        for name in RECORDED:
            if name in arguments:
                arguments[name] = _recorder(name, records)
        _name_helpers(function)
        columns = {name: value for name, value in arguments.items() if name not in NOT_COLUMNS}
        given = packing.dump(columns).content
        write_generators(task.generators)
        _uses_of_group.clear()
        began, failure, values = time.monotonic(), None, None
        try:
            values = listed(self._call(function, arguments), len(arguments["prompts"]))
        except BaseException as error:  # noqa: BLE001 - whatever the function raises
            failure = _failure(error)
        seconds = time.monotonic() - began
        if _uses_of_group:  # also if the function has handled that
            return Reply(stays=USES_GROUP)
        if failure is not None:
            return Reply(records=records, failure=failure, seconds=seconds)
        if not _is_unchanged(function, before):
            return Reply(stays="changes its own state")
        if not _is_unchanged(columns, given):
            return Reply(stays="changes the columns that it is given")
        return Reply(values=values, records=records, generators=read_generators(), seconds=seconds)

    def _function(self, task: Task) -> tuple[Any, bytes]:
        if task.function is not None:
            function = pickle.loads(task.function)
            before = packing.dump(function).content
            if packing.dump(function).content != before:
                raise pickle.PicklingError("two pickles of it differ, so a change would not be noticed")
            # functions share the classes of the script, and loading one sets the attributes of a class again
            known = {key: (one, packing.dump(one).content) for key, (one, _) in self._functions.items()}
            self._functions = {**known, task.key: (function, before)}
        return self._functions[task.key]

    def _call(self, function: Any, arguments: dict[str, Any]) -> Any:
        result = function(**arguments)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(result)


def _is_unchanged(value: Any, before: bytes) -> bool:
    try:
        return packing.dump(value).content == before
    except Exception:  # noqa: BLE001 - it holds something now that cannot be pickled
        return False


def _recorder(name: str, records: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> Any:
    def record(*args: Any, **kwargs: Any) -> None:
        records.append((name, args, kwargs))

    return record


def _name_helpers(function: Any) -> None:
    """Let the helpers of a function be found by name, as a pool of processes does that is started by it.

    Before each call: another function of the script has helpers of the same names, which are other objects
        here.
    """
    space = getattr(packing.inner_function(function), "__globals__", {})
    helpers = {name: value for name, value in space.items() if not name.startswith("__")}
    sys.modules["__main__"].__dict__.update(helpers)


def _failure(error: BaseException) -> Failure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    kind, message = FailureKind.exception, _line(error)
    if isinstance(error, OutputError):
        kind, message = FailureKind.output, str(error)
    elif is_expired_limit(one.__name__ for one in type(error).__mro__):
        kind, message = FailureKind.timeout, f"raised {message}"
    return Failure(kind=kind, message=message, traceback=text[-MAX_TRACEBACK_CHARACTERS:])


def _pickled(reply: Reply) -> bytes:
    try:
        return packing.dump(reply).content
    except Exception as error:  # noqa: BLE001 - of what the function has logged
        return pickle.dumps(Reply(stays=f"logs values that cannot be pickled ({_line(error)})"))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class OutputError(ValueError):
    """A reward function has not returned one value for each completion."""


def listed(output: Any, expected: int) -> list[Any]:
    """Return the output as a list. What its values mean is decided where rewards are combined.

    Args:
        output: any iterable, also a tensor or an array.
        expected: the number of completions.

    Raises:
        OutputError: the number of values is another one.
    """
    try:
        values = list(output.tolist() if hasattr(output, "tolist") else output)
    except TypeError:
        raise OutputError(
            f"returned {type(output).__name__} instead of a list of {expected} rewards"
        ) from None
    if len(values) != expected:
        raise OutputError(f"returned {len(values)} rewards, but {expected} were expected, one per completion")
    return values


REFUSED = ("is_initialized", "init_process_group")
"""Functions of torch.distributed. All others that need the group call the first one."""
_uses_of_group: list[str] = []
"""By the call that runs."""


class ProcessGroupUsedError(BaseException):
    """A function has asked for the process group. No `Exception`, so that the function does not handle it."""


def _refuse_process_group() -> None:
    """Refuse torch's process group in this process, which is no member of the rank's.

    A function that asks whether there is a group would skip its collective here and return another reward;
    one that opens a group would meet the store of the ranks. Both belong into the rank.
    """
    import torch.distributed

    if torch.distributed.is_available():
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            for name in REFUSED:
                setattr(module, name, _refuse)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    _uses_of_group.append(USES_GROUP)
    raise ProcessGroupUsedError
