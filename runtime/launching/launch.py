"""Launch a run: `launch(RunRequest) -> RunResult`, as `grpo-run launch` does and as a program can.

    from grpo_run.runtime.launching.launch import RunRequest, TorchrunOptions, launch

    result = launch(RunRequest(target="train.py", torchrun=TorchrunOptions(nproc_per_node="2")))
    print(result.state, result.sentence, result.run_directory)

Creates and locks the run directory, and decides whether there is anything left to run. The request is checked
in `_configuration.py`, and the run itself connected and supervised in `_supervise.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

import structlog

from grpo_run.runtime.catalog import has_trained
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_USAGE, RunDirectoryError, UsageError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import DeadlineOptions, RunOptions, Timeouts
from grpo_run.runtime.launch.imported_files import renew_record
from grpo_run.runtime.launch.inputs import commit_of
from grpo_run.runtime.launching import _staging as staging
from grpo_run.runtime.launching._configuration import PreparedLaunch, configure
from grpo_run.runtime.launching._identity import ChangedFiles, check_against_run, check_inputs, inputs_of
from grpo_run.runtime.launching._on_end import end_record, run_on_end, status_or_none
from grpo_run.runtime.launching._stop_signals import note_signals
from grpo_run.runtime.launching.display import Display, LineDisplay
from grpo_run.runtime.launching.notifications import Notifier
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.launching.request import LaunchOptions, RunRequest, RunResult
from grpo_run.runtime.launching.torchrun import TorchrunOptions
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.registry import forget, register, registry_folder, targets_folder, withdraw_target
from grpo_run.runtime.supervisor import last_resort
from grpo_run.runtime.upstream import process_names

__all__ = [
    "DeadlineOptions",
    "LaunchOptions",
    "RunOptions",
    "RunRequest",
    "RunResult",
    "Timeouts",
    "TorchrunOptions",
    "launch",
]


SERVER_SECONDS = 5.0
"""How long the forkserver of a run that has ended may take to exit."""


def launch(request: RunRequest, display: Display | None = None, *, exits_after: bool = False) -> RunResult:
    """Start a run or continue it, supervise it until it ends, and return how it has ended.

    While it lasts, this process handles the signals that stop a run, and is the parent of the run's
    processes, so call it from the main thread, for one run at a time. Signal handlers, environment variables,
    the hook of threads and the configuration of structlog are put back afterwards.

    Args:
        request: what to run.
        display: shows the run; None for messages as lines on standard error.
        exits_after: this process exits with the exit code of the result, which no signal may change any more.
            Nothing is put back.

    Raises:
        UsageError: something is wrong that the user can correct. Nothing is lost, and no new run directory is
            left.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("launch() handles signals: call it from the main thread")
    with contextlib.nullcontext() if exits_after else _put_back():
        return _run(configure(request), LineDisplay() if display is None else display)


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Put back what a launch changes in its process."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    environment, hook, logging = dict(os.environ), threading.excepthook, structlog.get_config()
    own_server = process_names.forkserver_pid() is None  # else the program has one for itself
    try:
        yield
    finally:
        if own_server:
            forkserver.stop_server(SERVER_SECONDS)
        threading.excepthook = hook
        structlog.configure(**logging)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)


def _run(prepared: PreparedLaunch, display: Display) -> RunResult:
    """Supervise the run. A launch that is refused leaves no run directory that it has made."""
    directory = RunDirectory(path=prepared.config.run_directory)
    made = not directory.path.exists()
    try:
        result = _locked(prepared, directory, display)
    except UsageError:
        _discard(directory, made=made)
        raise
    if result.exit_code == EXIT_USAGE:
        _discard(directory, made=made)
    return result


def _discard(directory: RunDirectory, *, made: bool) -> None:
    """Remove the run directory of a launch that was refused: it could be taken for a run."""
    if not made or not directory.path.exists() or has_trained(directory):
        return
    # it cannot be written, is another launch's by now, or has files of others
    with contextlib.suppress(RunDirectoryError, OSError), directory.locked():
        for path in directory.own_files():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        forget(directory.path, registry_folder())
        directory.path.rmdir()


def _locked(prepared: PreparedLaunch, directory: RunDirectory, display: Display) -> RunResult:
    with contextlib.ExitStack() as stack:
        # before anything is created: an address that cannot be used leaves nothing behind
        stack.callback(display.release)
        display.reserve()
        changed = directory.create()
        if changed is not None:
            print(f"grpo-run: {changed}", file=sys.stderr)
        stack.enter_context(directory.locked())
        withdraw_target(directory.path, targets_folder())  # of a launch that was killed
        stack.callback(withdraw_target, directory.path, targets_folder())
        try:
            return _resume_or_supervise(prepared, directory, display)
        except (UsageError, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - of grpo-run itself, outside the supervisor's handler
            return _report_failure(prepared, directory, error)


def _report_failure(prepared: PreparedLaunch, directory: RunDirectory, error: Exception) -> RunResult:
    """Report an exception of grpo-run itself, to the user, to `--notify` and to the command of `--on-end`."""
    sentence = f"grpo-run itself failed: {last_resort.describe(error)}."
    report = last_resort.write_report(directory.incidents, error, step=0, part="`grpo-run launch`")
    print(f"grpo-run: {sentence} Report: {report}", file=sys.stderr)
    notifier = Notifier(prepared.options.notify, "", prepared.config.run_id)
    notifier.tell(sentence)
    notifier.start(History(), lambda text: print(f"grpo-run: {text}", file=sys.stderr))
    notifier.end()
    result = RunResult(
        exit_code=EXIT_GAVE_UP, state="failed", sentence=sentence, run_id=prepared.config.run_id,
        run_directory=directory.path, status=status_or_none(directory),
    )  # fmt: skip
    if (command := prepared.options.on_end) is not None:
        record = end_record(result)
        run_on_end(command, record, warn=lambda text: print(f"grpo-run: warning: {text}", file=sys.stderr))
    return result


def _resume_or_supervise(prepared: PreparedLaunch, directory: RunDirectory, display: Display) -> RunResult:
    config = prepared.config
    history = run_reader(directory).history()
    if history.completed and (result := _write_the_rest(config.run_id, directory, history)) is not None:
        return result
    inputs = inputs_of(config, prepared.script)
    check_inputs(config.run_id, directory, history, inputs, accept_change=prepared.options.accept_change)
    check_against_run(config, directory, history)
    if history.finished and history.ended_early is None:
        return _has_finished(config.run_id, directory)
    if (call := history.ended_early) is not None:
        print(
            f"grpo-run: the script of run {config.run_id} ended {call.place} at {call.progress}. It runs"
            " again and decides how to go on."
        )
    fields = {
        "working_directory": os.getcwd(), "typed": prepared.recorded, "inputs": inputs.as_json(),
        "git_commit": commit_of(prepared.script.resolve().parent),
    }  # fmt: skip
    register(directory.path, registry_folder())
    from grpo_run.runtime.launching._supervise import supervise

    with staging.staged(prepared, directory, history, fields) as staged:
        renew_record(directory.imports)
        return supervise(staged, directory, display, ChangedFiles(directory, inputs))


def _write_the_rest(run_id: str, directory: RunDirectory, history: History) -> RunResult | None:
    """Write what only memory has of a run whose script ran to its end. Nothing is trained, so no change
    matters.

    Returns:
        how the run has ended; None if nothing was in memory: the run has finished, or trains again what
        memory has lost.
    """
    from grpo_run.runtime.snapshots.last_writes import WAIT_SECONDS
    from grpo_run.runtime.supervisor.outcome import writing_command

    kept = staging.find(directory, run_id)
    if kept is not None:
        signals = note_signals()
        left = staging.write_kept_checkpoints(
            kept, directory, run_id, history, wait_seconds=WAIT_SECONDS, interrupted=lambda: bool(signals)
        )
        if left is not None and left.required:
            return _said(run_id, directory, EXIT_GAVE_UP, writing_command(directory.path))
        if not history.lost.sentence:
            return None if history.ended_early is not None else _has_finished(run_id, directory)
    elif history.finished:
        return None
    elif history.snapshot_step is not None:
        print("grpo-run: what only memory had is gone; the run continues from its newest checkpoint on disk")
        return None
    return _said(
        run_id,
        directory,
        EXIT_GAVE_UP,
        f"the script of run {run_id} ran to its end. {history.lost.sentence} Use --fresh to start a new run.",
    )


def _has_finished(run_id: str, directory: RunDirectory) -> RunResult:
    sentence = f"run {run_id} has finished. Use --fresh to start a new run."
    return _said(run_id, directory, EXIT_FINISHED, sentence)


def _said(run_id: str, directory: RunDirectory, exit_code: int, sentence: str) -> RunResult:
    """Print how the run has ended, and return it."""
    print(f"grpo-run: {sentence}")
    state = "finished" if exit_code == EXIT_FINISHED else "failed"
    return RunResult(
        exit_code=exit_code, state=state, sentence=sentence, run_id=run_id, run_directory=directory.path
    )
