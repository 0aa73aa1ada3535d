"""`grpo-run resume RUN`: start the recorded command of a run again, in its directory and with its variables.

The command is `grpo-run launch` with the words in `run.json`. What else has changed since is judged there, as
for a command that is typed again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.inputs import Inputs


def main(arguments: Sequence[str]) -> int:
    """Start the command; returns the run's exit code."""
    parser = CommandParser(
        prog="grpo-run resume",
        description=(
            "Start the recorded command of a run again, in the directory in which it was launched, with the"
            " recorded values of SEED and the other variables that are compared."
        ),
    )
    parser.add_argument("run", metavar="RUN", help="run directory or run id")
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
    folder = working_directory(run, fields)
    words = launch_words(run, fields, accept_change=options.accept_change)
    values = variables(fields, os.environ)
    print(f"grpo-run: in {folder}: {command_text(words, values)}", flush=True)
    if options.dry_run:
        return 0
    from grpo_run.cli import launch

    os.chdir(folder)
    os.environ.update(values)
    return launch.main(words)


def working_directory(run: RunDirectory, fields: Mapping[str, Any]) -> Path:
    """Return the directory in which the run was launched.

    Raises:
        UsageError: it is not recorded, or does not exist.
    """
    recorded = fields.get("working_directory")
    if not isinstance(recorded, str):
        raise UsageError(
            f"{run.run_json} does not say where the run was launched (an earlier release wrote it); run its"
            f" command there: {command_text([str(word) for word in fields.get('typed') or ()], {})}"
        )
    folder = Path(recorded)
    if not folder.is_dir():
        raise UsageError(f"the run in {run.path} was launched in {folder}, which does not exist any more")
    return folder


def launch_words(run: RunDirectory, fields: Mapping[str, Any], *, accept_change: bool) -> list[str]:
    """Return the words of `grpo-run launch` that continue the run.

    `--fresh` started it and would start another one. The directory is named, whatever its id is derived from.

    Raises:
        UsageError: the words are not recorded.
    """
    from grpo_run.cli.launching.options import OptionWords, build_parser

    typed = fields.get("typed")
    if not isinstance(typed, list) or not typed:
        raise UsageError(f"{run.run_json} does not hold the command of the run (an earlier release wrote it)")
    rest = [str(word) for word in typed]
    splitter = OptionWords(build_parser())
    words = ["--run-dir", str(run.path.resolve())]
    if accept_change:
        words.append("--accept-change")
    rest = splitter.split_generation(rest)
    while option := splitter.next_option(rest):
        if option[0].partition("=")[0] not in ("--fresh", "--run-id", "--run-dir", "--accept-change"):
            words += option
    return [*words, *rest]


def variables(fields: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded environment variables that have another value now."""
    recorded = Inputs.from_json(fields.get("inputs")) or Inputs()
    return {name: value for name, value in recorded.variables.items() if environment.get(name) != value}


def command_text(words: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the command as it can be typed."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return " ".join([*settings, shlex.join(["grpo-run", "launch", *words])])
