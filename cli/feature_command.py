"""Commands that features have: `grpo-run NAME [RUN]`, with options of their own.

Each has a module `command` with `NAME`, `HELP`, `add_options`, which takes the parser, and `run`, which takes
the run directory, its history and the options, and returns the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.features import modules
from grpo_run.runtime.launching.reading import run_reader

COMMANDS: dict[str, str] = {module.NAME: module.HELP for module in modules("command")}
"""What each does, by name."""


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command of a feature; returns the exit code."""
    module = next(one for one in modules("command") if command == one.NAME)
    description = f"{module.HELP[0].upper()}{module.HELP[1:]}."
    parser = CommandParser(prog=f"grpo-run {command}", description=description)
    parser.add_run()
    module.add_options(parser)
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    code: int = module.run(run, run_reader(run).read().history, options)
    return code
