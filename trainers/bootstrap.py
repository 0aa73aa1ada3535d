"""A rank's first and last code: prepares the process, runs the user's script unmodified, reports, leaves.

Called in each rank by the forkserver or by a fresh interpreter. To the script the process is what torchrun
would give it. Once the script's last line has run, the rank says so on the board and in the journal, lets go
of process groups under a deadline, runs exit handlers and leaves: what a library's teardown does after that
cannot fail the run. Does not train; the guard does its part from inside `Trainer.train`.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import io
import json
import os
import runpy
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from grpo_run.runtime import upstream
from grpo_run.runtime.errors import EXIT_STOPPED, EXIT_USAGE, Stopped, UsageError
from grpo_run.runtime.files import NO_SPACE_ERRNOS
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.processes.parent_death import allow_tracing_by, die_with_parent
from grpo_run.trainers.hooks.attach import install_guard
from grpo_run.trainers.rank.session import Session, current, open_session
from grpo_run.watchdog.evidence.collection import STACK_SIGNAL
from grpo_run.watchdog.evidence.source import is_users
from grpo_run.watchdog.observation import RankState

MAX_TRACEBACK_CHARACTERS = 32_000
TEARDOWN_SECONDS = 3.0
EXIT_HANDLER_SECONDS = 10.0


def main() -> NoReturn:
    """Run the rank to its end and leave the process; never returns."""
    settings = RankSettings.from_environment()
    if settings.preloaded:
        _redirect_output(settings.log)
        _refuse_inherited_cuda()
    else:
        die_with_parent(settings.parent_pid)
    _wrap_output(forked=settings.preloaded)
    allow_tracing_by(settings.parent_pid)
    _set_title(settings)
    _arm_stacks(settings.stacks)
    session = open_session(settings)
    try:
        code, completed = _run(settings, session)
    finally:
        _flush()
    _leave(session, code, completed)


def _run(settings: RankSettings, session: Session) -> tuple[int, bool]:
    """Run the script; returns the exit code, and whether the rank's work is done (or stopped by agreement)."""
    try:
        session.start()
        install_guard(session)
        _run_script(settings)
    except Stopped:
        return EXIT_STOPPED, True
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            code = 1
        if code != 0:
            _report(session, error)
        elif session.slot.state is RankState.training:
            # well meant or not: peers that still train need to know from which line
            _write_error(session, error)
        return code & 0xFF, code == 0
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        _report(session, error)
        return EXIT_USAGE, False
    except BaseException as error:  # noqa: BLE001 - whatever leaves the script must be written down
        _report(session, error)
        # the frames of runpy and of this file are no news to the user
        traceback.print_exception(type(error), error, _user_frames(error))
        return 1, False
    return 0, True


def _run_script(settings: RankSettings) -> None:
    """What `python -u script arguments` (or `python -u -m module arguments`) does, in this process."""
    config = settings.config
    sys.argv = [config.target, *config.arguments]
    if config.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(config.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(config.target)))
        path = os.path.abspath(config.target)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        # runpy.run_path would take the module away before exit handlers run, and rewrite sys.argv[0]
        module = types.ModuleType("__main__")
        module.__dict__.update(__file__=path, __builtins__=builtins, __package__=None)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # noqa: S102 - running the user's script is what this is for


class _Output(io.FileIO):
    """A rank's output, of which a full disk loses what it does not take: no reason for a `print` to end a training."""

    def write(self, data: Any) -> int:
        """As its base, but for a full disk."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            return memoryview(data).nbytes


def _redirect_output(log: str) -> None:
    """Point stdout and stderr at the rank's file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _wrap_output(*, forked: bool) -> None:
    """The layers that torchrun's `python -u` makes: nothing is held back that a kill could lose."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = _Output(number, "w", closefd=False)
        # the forkserver's own streams are another environment's
        encoding, errors = "utf-8", "backslashreplace"
        if not forked:
            encoding, errors = getattr(sys, name).encoding, getattr(sys, name).errors
        setattr(sys, name, io.TextIOWrapper(raw, encoding, errors, write_through=True))


def _refuse_inherited_cuda() -> None:
    """A forkserver that had opened CUDA cannot serve: begin again as a fresh interpreter, same process."""
    if upstream.cuda_was_opened_before_fork():
        settings = RankSettings.from_environment().model_copy(
            update={"preloaded": False, "parent_pid": os.getppid()}
        )
        code = "import sys; del sys.path[0]; from grpo_run.trainers.bootstrap import main; main()"
        os.execve(
            sys.executable, [sys.executable, "-u", "-c", code], {**os.environ, **settings.to_environment()}
        )


def _set_title(settings: RankSettings) -> None:
    import setproctitle

    setproctitle.setproctitle(settings.title)


def _arm_stacks(path: str) -> None:
    """Let one signal write every thread's stack to a file, and so does a crash."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.enable(descriptor)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)


def _user_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    frame = error.__traceback__
    start = frame
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            start = frame
            break
        frame = frame.tb_next
    return start


def _report(session: Session, error: BaseException) -> None:
    """Write what was raised, and where, for the supervisor; the board says that this rank failed."""
    _write_error(session, error)
    session.slot.state = RankState.failed
    session.slot.touch()


def _write_error(session: Session, error: BaseException) -> None:
    """For the supervisor; on a full disk it has only the exit code to go by."""
    error.__traceback__ = _user_frames(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    last = next(reversed(own or list(frames)), None)
    record = {
        "type": type(error).__name__,
        "message": _message(error)[:4000],
        "traceback": text
        if len(text) <= MAX_TRACEBACK_CHARACTERS
        else "…" + text[-MAX_TRACEBACK_CHARACTERS:],
        "location": [last.filename, last.lineno or 0, last.name] if last is not None else None,
        "wall_time": time.time(),
    }
    temporary = session.settings.error + ".new"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file)
        os.replace(temporary, session.settings.error)
    except OSError as failure:
        session.warn_in_journal(f"what was raised could not be written down: {failure}")


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's own __str__
        return "its text could not be had: str() failed"


def _leave(session: Session, code: int, completed: bool) -> NoReturn:
    """Say how it ended, run exit handlers, let go of the groups, and leave."""
    # threads that are no daemons are the script's: it has ended when they have
    with_deadline(upstream.wait_for_threads, TEARDOWN_SECONDS if code else None)
    if completed:
        session.slot.state = RankState.done
        session.slot.touch()
        session.journal.write("rank_completed", rank=session.rank, step=session.slot.step, exit_code=code)
    if completed:
        upstream.run_exit_handlers()
    else:
        # peers wait for this rank's end; a handler that hangs must not hide the failure
        with_deadline(upstream.run_exit_handlers, EXIT_HANDLER_SECONDS)
    with_deadline(_destroy_groups, TEARDOWN_SECONDS)
    _flush()
    os._exit(code)


def _destroy_groups() -> None:
    opened = current()
    if opened is not None:
        opened.close()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # some backends complain when a peer has left first; the run is over either way
        with contextlib.suppress(RuntimeError, ValueError):
            distributed.destroy_process_group()


def with_deadline(function: Callable[[], object], seconds: float | None) -> bool:
    """Call `function`, giving up on it after `seconds`; returns whether it came back. None waits as long as it takes."""
    if seconds is None:
        function()
        return True
    thread = threading.Thread(target=function, daemon=True, name="grpo-run-teardown")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # a script may have closed them, which is its right
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
