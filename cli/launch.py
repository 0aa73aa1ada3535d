"""`grpo-run launch [options] SCRIPT.py [script arguments]`: run a training script under supervision.

Creates and locks the run directory, and decides whether there is anything left to run. The command line is
parsed, and the run itself connected and supervised, in `launching/`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from grpo_run.cli.launching import staging
from grpo_run.cli.launching.command import LaunchCommand, parse
from grpo_run.cli.launching.identity import ChangedFiles, check_against_run, check_inputs, inputs_of
from grpo_run.cli.launching.notifications import Notifier
from grpo_run.cli.launching.on_end import end_record, run_on_end, status_or_none
from grpo_run.cli.launching.stop_signals import after_end, note_signals, stop_signals
from grpo_run.runtime.catalog import has_trained
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_USAGE, RunDirectoryError, UsageError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import fails_to_resume
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.imported_files import renew_record
from grpo_run.runtime.launch.inputs import commit_of
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.processes.starting import interpreter_command
from grpo_run.runtime.registry import forget, register, registry_folder, targets_folder, withdraw_target
from grpo_run.runtime.supervisor import last_resort

if TYPE_CHECKING:
    from grpo_run.dashboards.metrics.address import Listener


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    return run(parse(arguments))


def run(launch: LaunchCommand) -> int:
    """Supervise one run until it ends; if it cannot be resumed and the user wants it, another one from the
    beginning."""
    ignored = {number for number in stop_signals() if signal.getsignal(number) is signal.SIG_IGN}
    environment = dict(os.environ)
    code = _run(launch)
    config = launch.config
    if code == EXIT_GAVE_UP and config.may_start_over and not after_end:
        history = run_reader(RunDirectory(path=config.run_directory)).history()
        of_this_launch = len(history.recoveries) > history.recoveries_at_start
        if of_this_launch and fails_to_resume(history.recoveries):
            for number in stop_signals() - ignored:
                signal.signal(number, signal.SIG_DFL)  # the new program would ignore what is ignored here
            _start_over(launch, environment)
    return code


def _start_over(launch: LaunchCommand, environment: dict[str, str]) -> NoReturn:
    """Replace this process by a launch of a new run: nothing that the old one has set up is left in it.

    Args:
        environment: with which the command was started.
    """
    config = launch.config
    print(
        f"grpo-run: starting over, because run {config.run_id} cannot be resumed; its files stay as they are",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    command = interpreter_command(f"{__name__}:main_of_new_run")
    words = [*command, str(config.starts_over + 1), *launch.typed]
    os.execve(command[0], words, environment)


def main_of_new_run() -> NoReturn:
    """Entry point of `_start_over`."""
    try:
        sys.exit(run(parse(sys.argv[2:], starts_over=int(sys.argv[1]))))
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _run(launch: LaunchCommand) -> int:
    """Supervise the run. A launch that is refused leaves no run directory that it has made."""
    directory = RunDirectory(path=launch.config.run_directory)
    made = not directory.path.exists()
    try:
        code = _locked(launch, directory)
    except UsageError:
        _discard(directory, made=made)
        raise
    if code == EXIT_USAGE:
        _discard(directory, made=made)
    return code


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


def _locked(launch: LaunchCommand, directory: RunDirectory) -> int:
    with contextlib.ExitStack() as stack:
        # before anything is created: an address that cannot be used leaves nothing behind
        listener = open_listener(launch)
        if listener is not None:
            stack.enter_context(listener.socket)
        changed = directory.create()
        if changed is not None:
            print(f"grpo-run: {changed}", file=sys.stderr)
        stack.enter_context(directory.locked())
        withdraw_target(directory.path, targets_folder())  # of a launch that was killed
        stack.callback(withdraw_target, directory.path, targets_folder())
        try:
            return _resume_or_supervise(launch, directory, listener)
        except (UsageError, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - of grpo-run itself, outside the supervisor's handler
            _report_failure(launch, directory, error)
            return EXIT_GAVE_UP


def _report_failure(launch: LaunchCommand, directory: RunDirectory, error: Exception) -> None:
    """Report an exception of grpo-run itself, to the user, to `--notify` and to the command of `--on-end`."""
    sentence = last_resort.describe(error)
    report = last_resort.write_report(directory.incidents, error, step=0, part="`grpo-run launch`")
    print(f"grpo-run: grpo-run itself failed: {sentence}. Report: {report}", file=sys.stderr)
    notifier = Notifier(launch.notify, "", launch.config.run_id)
    notifier.tell(f"grpo-run itself failed: {sentence}.")
    notifier.start(History(), lambda text: print(f"grpo-run: {text}", file=sys.stderr))
    notifier.end()
    if launch.on_end is None:
        return
    record = end_record(
        run_id=launch.config.run_id, directory=directory.path, state="failed", exit_code=EXIT_GAVE_UP,
        sentence=f"grpo-run itself failed: {sentence}.", status=status_or_none(directory),
    )  # fmt: skip
    run_on_end(launch.on_end, record, warn=lambda text: print(f"grpo-run: warning: {text}", file=sys.stderr))


def _resume_or_supervise(launch: LaunchCommand, directory: RunDirectory, listener: Listener | None) -> int:
    config = launch.config
    history = run_reader(directory).history()
    if history.completed and (code := _write_the_rest(config.run_id, directory, history)) is not None:
        return code
    inputs = inputs_of(config, launch.script)
    check_inputs(config.run_id, directory, history, inputs, accept_change=launch.accept_change)
    check_against_run(config, directory, history)
    if history.finished and history.ended_early is None:
        return _has_finished(config.run_id)
    if (call := history.ended_early) is not None:
        print(
            f"grpo-run: the script of run {config.run_id} ended {call.place} at {call.progress}. It runs"
            " again and decides how to go on."
        )
    fields = {
        "working_directory": os.getcwd(), "typed": launch.recorded, "inputs": inputs.as_json(),
        "git_commit": commit_of(launch.script.resolve().parent),
    }  # fmt: skip
    register(directory.path, registry_folder())
    from grpo_run.cli.launching.supervise import supervise

    with staging.staged(launch, directory, history, fields) as staged:
        renew_record(directory.imports)
        return supervise(staged, directory, listener, ChangedFiles(directory, inputs))


def _write_the_rest(run_id: str, directory: RunDirectory, history: History) -> int | None:
    """Write what only memory has of a run whose script ran to its end. Nothing is trained, so no change
    matters.

    Returns:
        the exit code; None if nothing was in memory: the run has finished, or trains again what memory has
        lost.
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
            print(f"grpo-run: {writing_command(directory.path)}")
            return EXIT_GAVE_UP
        if not history.lost.sentence:
            return None if history.ended_early is not None else _has_finished(run_id)
    elif history.finished:
        return None
    elif history.snapshot_step is not None:
        print("grpo-run: what only memory had is gone; the run continues from its newest checkpoint on disk")
        return None
    print(
        f"grpo-run: the script of run {run_id} ran to its end. {history.lost.sentence} Use --fresh to start"
        " a new run."
    )
    return EXIT_GAVE_UP


def _has_finished(run_id: str) -> int:
    print(f"grpo-run: run {run_id} has finished. Use --fresh to start a new run.")
    return EXIT_FINISHED


def open_listener(launch: LaunchCommand) -> Listener | None:
    """Open the port of the metrics server; None if there is none.

    Raises:
        UsageError: the address cannot be used.
    """
    if launch.metrics_address == "off":
        return None
    from grpo_run.dashboards.metrics import address

    return address.open_listener(launch.metrics_address)
