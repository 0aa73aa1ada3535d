"""`grpo-run resume RUN`: start the recorded command of a run again, in its directory and with its variables.

The command is `grpo-run launch` with the words in `run.json`. What else has changed since is judged there, as
for a command that is typed again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.inputs import Inputs
from grpo_run.runtime.launching.notifications import PATH_LEFT_OUT


def main(arguments: Sequence[str]) -> int:
    """Start the command; returns the run's exit code."""
    parser = CommandParser(
        prog="grpo-run resume",
        description=(
            "Start the recorded command of a run again, in the directory in which it was launched, with the"
            " recorded values of SEED and the other variables that are compared."
        ),
    )
    parser.add_run()
    parser.add_argument(
        "--accept-change",
        action="store_true",
        help="as of grpo-run launch: continue although something that affects training has changed",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and start nothing")
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    fields = run.read_run()
    owner = run.owner()
    if owner is not None:
        raise UsageError(f"the run in {run.path} is running (supervisor {owner})")
    folder = Path(fields["working_directory"])
    if not folder.is_dir():
        raise UsageError(f"the run in {run.path} was launched in {folder}, which does not exist any more")
    if fields["typed"] is None:
        raise UsageError(
            f"the run in {run.path} was launched by a program, not by a command; start that again"
        )
    words = launch_words(run, fields["typed"], accept_change=options.accept_change)
    inputs = Inputs.from_json(fields.get("inputs")) or Inputs()
    values = {name: value for name, value in inputs.variables.items() if os.environ.get(name) != value}
    settings = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    command = " ".join([*settings, shlex.join(["grpo-run", "launch", *words])])
    print(f"grpo-run: in {folder}: {command}", flush=True)
    if options.dry_run:
        return 0
    from grpo_run.cli import launch

    os.chdir(folder)
    os.environ.update(values)
    return launch.main(words)


def launch_words(run: RunDirectory, typed: Sequence[str], *, accept_change: bool) -> list[str]:
    """Return the words of `grpo-run launch` that continue the run.

    `--fresh` started it and would start another one. The directory is named, whatever its id is derived from.
    An address of which `run.json` has no path is left out, and the user is told.
    """
    from grpo_run.cli.launching.options import OptionWords, build_parser

    splitter = OptionWords(build_parser())
    words = ["--run-dir", str(run.path.resolve())]
    if accept_change:
        words.append("--accept-change")
    rest = list(typed)
    while option := splitter.next_option(rest):
        name = option[0].partition("=")[0]
        if option[-1].endswith(PATH_LEFT_OUT):
            print(f"grpo-run: warning: continuing without {name}: only an address in a file is recorded")
        elif name not in ("--fresh", "--run-id", "--run-dir", "--accept-change"):
            words += option
    return [*words, *rest]
