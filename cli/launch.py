"""`grpo-run launch [options] SCRIPT.py [script arguments]`: run a training script under supervision.

Parses the command line, calls `launch` with the request, and exits with the run's exit code. A run that
cannot be resumed is followed by another one if the user wants it (`--on-resume-failure fresh`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from grpo_run.cli.launching.command import parse
from grpo_run.cli.launching.display import CommandDisplay
from grpo_run.cli.launching.refusal import tell_others
from grpo_run.runtime.errors import EXIT_USAGE, UsageError
from grpo_run.runtime.launching.request import RunRequest, RunResult
from grpo_run.runtime.processes.starting import interpreter_command


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    try:
        return run(*parse(arguments))
    except UsageError as error:
        tell_others(arguments, error)
        raise


def run(request: RunRequest, display: CommandDisplay) -> int:
    """Supervise one run until it ends; if it cannot be resumed and the user wants it, another one from the
    beginning."""
    from grpo_run.runtime.launching.launch import launch  # help is shown without what it imports

    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    environment = dict(os.environ)
    result = launch(request, display, exits_after=True)
    if result.starts_over is not None:
        for number in signal.valid_signals() - ignored:
            # the new program would ignore what is ignored here
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        _start_over(request, result, environment)
    return result.exit_code


def _start_over(request: RunRequest, result: RunResult, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a launch of a new run: nothing that the old one has set up is left in it.

    Args:
        environment: with which the command was started.
    """
    assert request.typed is not None
    print(
        f"grpo-run: starting over, because run {result.run_id} cannot be resumed; its files stay as they are",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    command = interpreter_command(f"{__name__}:main_of_new_run")
    words = [*command, str(result.starts_over), *request.typed]
    os.execve(command[0], words, environment)


def main_of_new_run() -> NoReturn:
    """Entry point of `_start_over`."""
    try:
        sys.exit(run(*parse(sys.argv[2:], starts_over=int(sys.argv[1]))))
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
