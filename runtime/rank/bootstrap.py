"""Entry point of a rank: prepare the process, run the user's script, report the result, and exit.

Called in each rank by the forkserver or by a fresh interpreter. The script sees the process that torchrun
would give it. When the script has returned, the rank says so on the board, waits for the script's threads,
reports completion on the board and in the journal, runs exit handlers, releases process groups within a time
limit, and exits; a failure of a library's teardown cannot fail the run. A process that the script forks may
return here too, by the end of the script or by an exception; it exits as a Python program does and reports
nothing. Does not train: the guard acts inside `Trainer.train`.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import functools
import io
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import NoReturn

from grpo_run.runtime.errors import EXIT_STOPPED, EXIT_USAGE, Stopped, UsageError
from grpo_run.runtime.history.events import FreshInterpreters, RankCompleted
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.processes.starting import (
    STARTED_WITH,
    allow_tracing_by,
    die_with_parent,
    interpreter_command,
)
from grpo_run.runtime.rank import inherited_modules
from grpo_run.runtime.rank.error_report import user_traceback, write_error
from grpo_run.runtime.rank.inherited_modules import InheritedModules, forget_shadowed
from grpo_run.runtime.rank.output import flush_output, redirect_output, wrap_output
from grpo_run.runtime.rank.points import RankFeature
from grpo_run.runtime.rank.session import Session, current, open_session
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.evidence.stack_capture import STACK_SIGNAL
from grpo_run.watchdog.observation import RankState

TEARDOWN_SECONDS = 3.0
"""Time limit for releasing process groups, and for the threads of a script that failed."""
EXIT_HANDLER_SECONDS = 10.0
"""Time limit for the exit handlers of a script that failed."""


def main(features: Sequence[RankFeature] = (), entry: str = f"{__name__}:main") -> NoReturn:
    """Run the script and exit the process with its exit code. Does not return.

    Args:
        features: take part in this rank.
        entry: what a fresh interpreter calls if this process cannot run the script.
    """
    settings = RankSettings.from_environment()
    inherited = None
    if settings.cpus:
        os.sched_setaffinity(0, settings.cpus)  # threads and processes of the rank inherit it
    if settings.preloaded:
        redirect_output(settings.log, settings.errors or settings.log)
    for feature in features:
        feature.fork(settings)
    if settings.preloaded:
        inherited = _hide_inherited_modules(settings, entry)
    elif not settings.fresh_because:  # else the fork has done it
        die_with_parent(settings.parent_pid)
    wrap_output(forked=settings.preloaded)
    allow_tracing_by(settings.parent_pid)
    _set_title(settings)
    _dump_stacks_to(settings.stacks)
    session = open_session(settings)
    try:
        code, completed = _run(settings, session, inherited, features)
    finally:
        flush_output()
    _exit(session, code, completed, features)


def _run(
    settings: RankSettings,
    session: Session,
    inherited: InheritedModules | None = None,
    features: Sequence[RankFeature] = (),
) -> tuple[int, bool]:
    """Run the script.

    Return the exit code, and whether the rank completed its work or stopped by agreement.
    """
    try:
        session.start()
        if settings.fresh_because:
            session.journal.write(FreshInterpreters(rank=session.rank, reason=settings.fresh_because))
            session.warn(f"{settings.fresh_because}: ranks start as fresh interpreters")
        # imported after the session is open: until then the board does not show this rank
        from grpo_run.runtime.rank.hooks.attach import install_guard

        install_guard(session, features)
        _end_at_usage_error(session)
        try:
            _run_script(settings, inherited)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                session.script_returned()
            else:
                session.script_raised()
            raise
        session.script_returned()
    except Stopped:
        return EXIT_STOPPED, True
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            code = 1
        if code != 0:
            _fail(session, error)
        elif session.slot.state is RankState.training:
            # sys.exit(0) during training leaves the peers behind; the report says where it was called
            error.__traceback__ = user_traceback(error, __file__)
            write_error(session, error)
            return 0, False
        return code & 0xFF, code == 0
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        _fail(session, error)
        return EXIT_USAGE, False
    except BaseException as error:  # noqa: BLE001 - every exception that ends the script is reported
        _fail(session, error)
        traceback.print_exception(type(error), error, user_traceback(error, __file__))
        return 1, False
    return 0, True


def _end_at_usage_error(session: Session) -> None:
    """Let a usage error in another thread end the rank: Python ends that thread only, and the script would go
    on."""
    report = threading.excepthook

    @functools.wraps(report)  # a script finds the name that it finds under torchrun
    def excepthook(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if not isinstance(error, UsageError) or not session.is_rank:
            report(arguments)
            return
        print(f"grpo-run: {error}", file=sys.stderr)
        _fail(session, error)
        _leave(EXIT_USAGE)

    threading.excepthook = excepthook


def _run_script(settings: RankSettings, inherited: InheritedModules | None) -> None:
    """Run the script in this process as `python script arguments` or `python -m module arguments` would."""
    config = settings.config
    sys.argv = [config.target, *config.arguments]
    before = list(sys.path)
    if sys.version_info < (3, 11) or not os.environ.get("PYTHONSAFEPATH"):
        target = os.getcwd() if config.module else os.path.dirname(os.path.realpath(config.target))
        sys.path.insert(0, target)
    if inherited is not None:
        inherited.compare()
    else:
        started_with = getattr(sys.modules["__main__"], STARTED_WITH, frozenset(sys.modules))
        forget_shadowed(started_with, sys.path, before)
    if config.module:
        runpy.run_module(config.target, run_name="__main__", alter_sys=True)
    else:
        path = os.path.abspath(config.target)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        # not runpy.run_path, which removes the module before exit handlers run and changes sys.argv[0]
        module = types.ModuleType("__main__")
        module.__dict__.update(__file__=path, __builtins__=builtins, __package__=None)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # noqa: S102 - this is the user's script


def _hide_inherited_modules(settings: RankSettings, entry: str) -> InheritedModules:
    """Hide what the warm interpreter has imported until the script imports the same; start over if it cannot
    be used."""
    environment = dict(os.environ)

    def start_over(reason: str) -> NoReturn:
        flush_output()
        with contextlib.suppress(OSError):
            os.unlink(settings.socket)  # torch's server does not replace one
        fresh = settings.model_copy(update={"preloaded": False, "fresh_because": reason})
        command = interpreter_command(entry)
        os.execve(command[0], command, {**environment, **fresh.to_environment()})

    def warn(text: str) -> None:
        session = current()
        if session is not None:
            session.warn(text)

    made = inherited_modules.current()
    if made is None:
        start_over("the libraries could not be imported in advance")
    if made.failure is not None:
        start_over(made.failure)
    if process_names.cuda_was_opened_before_fork():
        start_over("a library has initialized CUDA at import, which a fork cannot use")
    inherited = InheritedModules(made, start_over=start_over, warn=warn)
    inherited.hide()
    return inherited


def _set_title(settings: RankSettings) -> None:
    import setproctitle

    setproctitle.setproctitle(settings.title)


def _dump_stacks_to(path: str) -> None:
    """Write every thread's stack to a file on `STACK_SIGNAL` and on a crash."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.enable(descriptor)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)


def _fail(session: Session, error: BaseException) -> None:
    """Write the error file and mark the rank as failed on the board, unless this process is not the rank."""
    error.__traceback__ = user_traceback(error, __file__)
    if not session.is_rank:
        return
    session.accounting.script_raised(session.slot.running)
    write_error(session, error)
    session.slot.state = RankState.failed
    session.slot.publish()


def _exit(session: Session, code: int, completed: bool, features: Sequence[RankFeature] = ()) -> NoReturn:
    """Report completion, run exit handlers, release process groups, and exit."""
    # a thread may be in a `train()` call, which publishes its own states
    if completed and code == 0 and session.is_rank and session.slot.state is not RankState.training:
        session.slot.state = RankState.returned
        session.slot.publish()
    # the script's non-daemon threads are part of it
    with_deadline(process_names.wait_for_threads, TEARDOWN_SECONDS if code and session.is_rank else None)
    if not session.is_rank:  # as a Python program exits
        process_names.run_exit_handlers()
        _leave(code)
    for feature in features:
        with_deadline(feature.end, TEARDOWN_SECONDS)
    if completed:
        session.slot.state = RankState.done
        session.slot.publish()
        session.journal.write(RankCompleted(rank=session.rank, step=session.slot.step, exit_code=code))
    if completed:
        process_names.run_exit_handlers()
    else:
        # peers wait for this rank to exit, so an exit handler that hangs must not delay the failure
        with_deadline(process_names.run_exit_handlers, EXIT_HANDLER_SECONDS)
    if not session.is_rank:
        _leave(code)  # forked by an exit handler
    with_deadline(_destroy_groups, TEARDOWN_SECONDS)
    _leave(code)


def _leave(code: int) -> NoReturn:
    flush_output()
    os._exit(code)


def _destroy_groups() -> None:
    opened = current()
    if opened is not None:
        opened.keep_process_group()
        opened.close()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # some backends raise if a peer has exited first; the run is over in either case
        with contextlib.suppress(RuntimeError, ValueError):
            distributed.destroy_process_group()


def with_deadline(function: Callable[[], object], seconds: float | None) -> bool:
    """Call `function` with a time limit, and return whether it returned in time.

    Args:
        seconds: the time limit; None waits without limit.
    """
    if seconds is None:
        function()
        return True
    thread = threading.Thread(target=function, daemon=True, name="grpo-run-teardown")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
