"""The options of `grpo-run launch` and its help: torchrun's and ours, and where the script begins among the
words.

`-h` shows the most used options, `--help` all of them: ours by group, torchrun's, exit codes, examples.
Options are declared with the settings that they set (`runtime/launch/option.py`), and torchrun's in
`runtime/launching/torchrun.py`. Options come before the script; every word after it belongs to the script,
even if it looks like an option. Used by `command.py`, and by the commands that pass options on:
`train` and `resume`. Checks no value (`command.py`).
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching._display import DisplayOptions
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.launch.config import DeadlineOptions, RunOptions, Timeouts
from grpo_run.runtime.launch.option import Option, OptionGroup, default_of, options_of
from grpo_run.runtime.launching.request import LaunchOptions
from grpo_run.runtime.launching.torchrun import Declared, declared_options, option_names
from grpo_run.watchdog.text import did_you_mean

USAGE = """\
grpo-run launch [options] SCRIPT.py [script arguments]
       grpo-run launch [options] -m MODULE [script arguments]"""
DESCRIPTION = """\
Run a training script under supervision. Takes the place of torchrun and
accepts its options. When a rank dies or hangs, grpo-run records evidence,
names the cause, and restarts the ranks from the newest checkpoint or snapshot.
The same command resumes a run that was stopped."""
EXIT_CODES = """\
exit codes:
  0    the script has finished, and what it scheduled is on disk
  2    the command or a setting is wrong; nothing was lost
  75   stopped on request, with a checkpoint; run the same command to resume
  93   gave up, or grpo-run itself failed; the reason and the report are in the
       run directory; or stopped, and the same command would start over; or the
       script ran to its end, and a checkpoint that it scheduled is not on disk:
       the last line says where it is and what writes it
A script with no Trainer and no loop that ends itself after SIGTERM sets the
exit code of the stop."""
EXAMPLES = """\
examples:
  grpo-run launch --nproc-per-node 2 train.py --lr 1e-6
  grpo-run launch --accelerate-config ddp.yaml train.py
  grpo-run launch --nproc-per-node 2 -m trl.scripts.grpo --config grpo.yaml
  grpo-run launch --nproc-per-node 2 --show-ranks all train.py
  grpo-run launch --nproc-per-node 2 --inject kill@rank1:step7 train.py

Each rank's output is in attempts/NNN/rankN.log of the run directory, and its
standard error in rankN.err if both streams of this command are apart. Ranks
inherit standard input, as under torchrun."""
TORCHRUN_TITLE = "torchrun's options"
TORCHRUN = """\
These differ under grpo-run:
  --max-restarts    counts failures in a row without a newer checkpoint;
                    default 3
  --redirects, --tee, --local-ranks-filter
                    say whose output is shown; a file has the output of each
  --no-python, --run-path, --log-dir, --logs-specs, --duplicate-*-filters
                    are refused in one line"""
SHORT_EXAMPLES = """\
examples:
  grpo-run launch --nproc-per-node 2 train.py --lr 1e-6
  grpo-run launch --accelerate-config ddp.yaml train.py
  grpo-run launch --nproc-per-node 2 -m trl.scripts.grpo --config grpo.yaml

All options and exit codes: grpo-run launch --help"""
MODULE = Declared(help="the script is a module, as in `python -m`", short="-m")
"""torchrun's option that says what the script is."""
TORCHRUNS_MOST_USED = ("--nproc-per-node", "--module", "--max-restarts")
"""Options of torchrun that `-h` shows."""


def declared() -> Iterator[tuple[Option, Any]]:
    """Yield every option of ours with its default: of the launch, of the core, and of the features."""
    core = (LaunchOptions, DisplayOptions, RunOptions, DeadlineOptions, Timeouts)
    for settings in (*core, *feature_settings()):
        for field, found in options_of(settings):
            yield found, default_of(field)


class _ShortHelp(argparse.Action):
    """Print the most used options and exit: one spelling of each, and the first clause of its help."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        names = [*TORCHRUNS_MOST_USED, *(found.name for found, _ in declared() if found.most_used)]
        short = _empty_parser(SHORT_EXAMPLES)
        group = short.add_argument_group("most used options")
        actions = {name: action for action in parser._actions for name in action.option_strings}
        for action in map(actions.__getitem__, names):
            shown = copy.copy(action)
            shown.option_strings = [name for name in action.option_strings if "_" not in name]
            shown.help = (action.help or "").partition(";")[0].partition(" (default")[0]
            group._add_action(shown)
        short.print_help()
        parser.exit()


class _Listed(argparse._AppendAction):
    """Collect the values of an option; the value `help` prints what they may be, and exits."""

    def __init__(self, *args: Any, listed: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listed = listed

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        if values == "help":
            print(self._listed())
            parser.exit()
        super().__call__(parser, namespace, values, option)


def _empty_parser(epilog: str) -> CommandParser:
    return CommandParser(
        prog="grpo-run launch",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # as torchrun, whose scripts would otherwise break with each option that is added here
        allow_abbrev=False,
        add_help=False,
    )


def build_parser() -> CommandParser:
    """Return our options, and torchrun's after them. The value of one that is not given is None."""
    parser = _empty_parser(f"{EXIT_CODES}\n\n{EXAMPLES}")
    parser.add_argument("-h", action=_ShortHelp, nargs=0, help="show the most used options and exit")
    parser.add_argument("--help", action="help", help="show all options and exit")
    groups = {group: parser.add_argument_group(group.value) for group in OptionGroup}
    for found, default in declared():
        _add(groups[found.group], found, default)
    _add_torchruns(parser.add_argument_group(TORCHRUN_TITLE, TORCHRUN))
    return parser


def _add_torchruns(group: argparse._ArgumentGroup) -> None:
    """Declare torchrun's options and the script. A variable `PET_<NAME>` sets a default, as for torchrun."""
    for name, default, found in (*declared_options(), ("module", False, MODULE)):
        spellings = dict.fromkeys([*option_names(name, found), f"--{name}"])
        variable = os.environ.get(f"PET_{name.upper()}") if found.has_variable else None
        if isinstance(default, bool):
            given = bool(int(variable or "0"))
            group.add_argument(*spellings, action="store_true", default=given, help=found.help)
        else:
            group.add_argument(
                *spellings,
                default=default if variable is None else variable,
                type=found.kind,
                choices=list(found.choices) if found.choices else None,
                help=found.help,
            )
    group.add_argument("training_script", help="script or module that each rank runs")
    group.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")


def _add(group: argparse._ArgumentGroup, found: Option, default: Any) -> None:
    text = found.help
    if not found.metavar and not found.choices:
        group.add_argument(
            found.name, action="store_const", const=not default, default=None, help=text.replace("%", "%%")
        )
        return
    if "(default: " not in text and not found.repeated and default not in (None, ""):
        shown = f"{default:g}" if isinstance(default, float) else default
        text += f" (default: {','.join(default) if isinstance(default, tuple) else shown})"
    extra: dict[str, Any] = {"type": found.kind, "metavar": found.metavar or None}
    if found.choices:
        extra["choices"] = found.choices
    if found.listed is not None:
        extra |= {"action": _Listed, "listed": found.listed}
    elif found.repeated:
        extra["action"] = "append"
    group.add_argument(found.name, default=None, help=text.replace("%", "%%"), **extra)


def values_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a parsed command line by the option's name; None for what was not given."""
    return {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()}


INSTEAD = {
    "--num-processes": "the ranks of this host are --nproc-per-node N",
    "--num-machines": "the number of hosts is --nnodes N",
    "--machine-rank": "the number of this host is --node-rank N",
    "--main-process-ip": "the address of the first host is --master-addr HOST, or --rdzv-endpoint HOST:PORT",
    "--main-process-port": "the port of the first host is --master-port N, or --rdzv-endpoint HOST:PORT",
    "--config-file": "an accelerate configuration is --accelerate-config FILE",
    "--multi-gpu": "leave it out: --nproc-per-node N or an --accelerate-config FILE decides",
    **dict.fromkeys(
        ("--use-deepspeed", "--use-fsdp", "--deepspeed-config-file", "--zero-stage"),
        "give an --accelerate-config FILE that says so",
    ),
    "--on-resume-failure": "leave it out; after exit code 93, --fresh starts a new run",
    "--mixed-precision": "set bf16 or fp16 in the script, or give an --accelerate-config FILE",
}
"""Options of `accelerate launch`, and of earlier releases, and what is given here instead."""


class OptionWords:
    """Splits the words of a command into options and the rest, with a parser's option table.

    Args:
        parser: declares the options.
        extra: further options that take a value, such as `--set` of `grpo-run train`.
    """

    def __init__(self, parser: argparse.ArgumentParser, extra: Sequence[str] = ()) -> None:
        actions = parser._actions
        self._names = frozenset(name for action in actions for name in action.option_strings) | set(extra)
        self._switches = frozenset(
            name for action in actions if action.nargs == 0 for name in action.option_strings
        )

    def next_option(self, words: list[str]) -> list[str]:
        """Remove the first option and its value from `words` and return them; [] if a plain word comes first.

        Raises:
            UsageError: there is no such option; the message names the closest one.
        """
        if not words or words[0] == "--" or not words[0].startswith("-"):
            return []
        flag = words.pop(0)
        self._check(flag)
        alone = flag not in self._switches and "=" not in flag and (flag.startswith("--") or len(flag) == 2)
        return [flag, words.pop(0)] if alone and words else [flag]

    def _check(self, flag: str) -> None:
        name = flag.partition("=")[0]
        if not name.startswith("--") or name in self._names:
            return
        if instead := INSTEAD.get(name.replace("_", "-")):
            raise UsageError(f"no option {name}; {instead}")
        hint = did_you_mean(name.replace("_", "-"), sorted(self._names), "see grpo-run launch --help")
        raise UsageError(f"no option {name}; {hint}")

    def check(self, arguments: Sequence[str]) -> None:
        """Check the options of a command.

        Raises:
            UsageError: there is no such option; the message names the closest one.
        """
        words = list(arguments)
        while self.next_option(words):
            pass
