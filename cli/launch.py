"""`grpo-run launch [options] SCRIPT.py [script arguments]`: run a training script under supervision.

Creates and locks the run directory, and decides whether there is anything left to run. The command line is parsed in
`launch_options/`; the run itself is connected and supervised in `launching/`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_run.cli.launch_options import staging
from grpo_run.cli.launch_options.parse import LaunchCommand, parse
from grpo_run.cli.launch_options.resume_from import check_against_run
from grpo_run.cli.launch_options.run_inputs import ChangedFiles, check_inputs, inputs_of
from grpo_run.cli.launching.supervise import supervise
from grpo_run.cli.run_end.end_record import end_record, status_or_none
from grpo_run.cli.run_end.on_end import run_on_end
from grpo_run.runtime.catalog.registry import register, registry_folder
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, UsageError
from grpo_run.runtime.launch.git_commit import commit_of
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import read_journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.supervision import last_resort

if TYPE_CHECKING:
    from grpo_run.dashboards.metrics.address import Listener


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    return run(parse(arguments))


def run(launch: LaunchCommand) -> int:
    """Supervise one run until it ends."""
    with contextlib.ExitStack() as stack:
        # before anything is created: an address that cannot be used leaves nothing behind
        listener = open_listener(launch)
        if listener is not None:
            stack.enter_context(listener.socket)
        directory = RunDirectory(path=launch.config.run_directory)
        changed = directory.create()
        if changed is not None:
            print(f"grpo-run: {changed}", file=sys.stderr)
        stack.callback(os.close, directory.acquire())
        try:
            return _resume_or_supervise(launch, directory, listener)
        except (UsageError, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - of grpo-run itself, before or after the supervisor's own handler
            _report_failure(launch, directory, error)
            return EXIT_GAVE_UP


def _report_failure(launch: LaunchCommand, directory: RunDirectory, error: Exception) -> None:
    """Report an exception of grpo-run itself, to the user and to the command of `--on-end`."""
    sentence = last_resort.describe(error)
    report = last_resort.write_report(directory.incidents, error, step=0, part="`grpo-run launch`")
    print(f"grpo-run: grpo-run itself failed: {sentence}. Report: {report}", file=sys.stderr)
    if launch.on_end is None:
        return
    record = end_record(
        run_id=launch.config.run_id, directory=directory.path, state="failed", exit_code=EXIT_GAVE_UP,
        sentence=f"grpo-run itself failed: {sentence}.", status=status_or_none(directory),
    )  # fmt: skip
    run_on_end(launch.on_end, record, warn=lambda text: print(f"grpo-run: warning: {text}", file=sys.stderr))


def _resume_or_supervise(launch: LaunchCommand, directory: RunDirectory, listener: Listener | None) -> int:
    config = launch.config
    history = History.of(read_journal(directory.journal))
    inputs = inputs_of(launch)
    check_inputs(launch, directory, history, inputs)
    check_against_run(config, directory, history)
    if history.finished:
        kept = staging.find(directory, config.run_id)
        if kept is not None:  # the disk was full when the run finished
            staging.write_kept_checkpoints(kept, directory, config.run_id)
        print(f"grpo-run: run {config.run_id} has finished. Use --fresh to start a new run.")
        return EXIT_FINISHED
    fields = {
        "working_directory": os.getcwd(), "typed": list(launch.typed), "inputs": inputs.as_json(),
        "git_commit": commit_of(launch.sources[0].path.parent),
    }  # fmt: skip
    register(directory.path, registry_folder())
    with staging.staged(launch, directory, fields) as staged:
        return supervise(staged, directory, listener, ChangedFiles(launch, inputs))


def open_listener(launch: LaunchCommand) -> Listener | None:
    """Open the port of the metrics server; None if there is none.

    Raises:
        UsageError: the address cannot be used.
    """
    if launch.metrics_address == "off":
        return None
    from grpo_run.dashboards.metrics import address

    return address.open_listener(launch.metrics_address)
