"""Parse the command line of `grpo-run launch` into a request.

Called by `cli/launch.py`. Reads single values; whether they fit this machine, the script and each other is
checked in `runtime/launching/`. Executes nothing of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from grpo_run.cli.launching._display import CommandDisplay, DisplayOptions, output_form
from grpo_run.cli.launching.options import OptionWords, build_parser, values_of
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.launch.config import DeadlineOptions, RunOptions, Timeouts
from grpo_run.runtime.launch.option import given_values
from grpo_run.runtime.launching.request import LaunchOptions, RunRequest
from grpo_run.runtime.launching.torchrun import TorchrunOptions


def parse(arguments: Sequence[str]) -> tuple[RunRequest, CommandDisplay]:
    """Return the request, and what shows the run.

    Raises:
        UsageError: an option or its value is wrong; the message is the one line the user sees.
    """
    parser = build_parser()
    OptionWords(parser).check(arguments)
    options = parser.parse_args(arguments)
    given = values_of(options)
    timeouts = Timeouts(**given_values(Timeouts, given))
    if given["--stop-timeout"] is not None:
        timeouts = replace(timeouts, handler_seconds=timeouts.stop_seconds)
    request = RunRequest(
        target=options.training_script,
        module=bool(options.module),
        arguments=tuple(options.training_script_args),
        torchrun=TorchrunOptions(**{one.name: getattr(options, one.name) for one in fields(TorchrunOptions)}),
        launch=LaunchOptions(**given_values(LaunchOptions, given)),
        options=RunOptions(**given_values(RunOptions, given)),
        timeouts=timeouts,
        deadlines=DeadlineOptions(**given_values(DeadlineOptions, given)),
        features=tuple(one(**given_values(one, given)) for one in feature_settings()),
        output=output_form(),
        typed=tuple(arguments),
    )
    display = DisplayOptions(**given_values(DisplayOptions, given))
    return request, CommandDisplay(display, brief=given["--show-ranks"] is None)
