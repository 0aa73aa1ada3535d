"""The options of `grpo-run launch` and its help: torchrun's and ours, and where the script begins among the
words.

`-h` shows the most used options, `--help` all of them: ours by group, torchrun's, exit codes, examples.
Options are declared with the settings that they set (`runtime/launch/option.py`), those of one launch here,
and torchrun's in `_torchrun.py`. Options come before the script; every word after it belongs to the script,
even if it looks like an option. Used by `command.py`, and by the commands that pass options on:
`train` and `resume`. Checks no value (`command.py`).
"""

from __future__ import annotations

import argparse
import copy
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching._torchrun import add_torchruns
from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.launch.config import DeadlineOptions, RunConfig, Timeouts
from grpo_run.runtime.launch.option import Option, OptionGroup, default_of, option, options_of

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
TORCHRUNS_MOST_USED = ("--nproc-per-node", "--module", "--max-restarts")
"""Options of torchrun that `-h` shows."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What concerns one launch and not the run: where the run is, and who is told of it."""

    run_id: str | None = option(
        None, "--run-id", group=OptionGroup.run, metavar="ID", most_used=True,
        help="name of the run (default: the script's name and a digest of its path, its arguments and the"
        " working directory)",
    )  # fmt: skip
    run_dir: str | None = option(
        None, "--run-dir", group=OptionGroup.run, metavar="DIR",
        help="directory of the journal, logs and incidents, created with mode 0700; a directory that other"
        " users can write causes a warning (default: runs/ID)",
    )  # fmt: skip
    accept_change: bool = option(
        False, "--accept-change", group=OptionGroup.run, most_used=True,
        help="continue a run although its script, a file that it has imported or that its arguments name,"
        " SEED, or an option that affects training has changed (default: refuse)",
    )  # fmt: skip
    accelerate_config: str | None = option(
        None, "--accelerate-config", group=OptionGroup.run, metavar="FILE", most_used=True,
        help="apply a configuration file of `accelerate launch`",
    )  # fmt: skip
    snapshot_dir: str = option(
        str(SHARED_MEMORY_ROOT), "--snapshot-dir", group=OptionGroup.training, metavar="DIR|off",
        help="file system in memory that holds snapshots and checkpoints on their way to disk; off: training"
        " waits for the disk",
    )  # fmt: skip
    show_ranks: str | None = option(
        None, "--show-ranks", group=OptionGroup.display, metavar="RANKS", most_used=True,
        help="ranks whose output is shown: none, all, or numbers as 0,1 (default: none on a terminal; all in"
        " a pipe or a file, as under torchrun; warnings and events are always shown)",
    )  # fmt: skip
    metrics_addr: str = option(
        DEFAULT_ADDRESS, "--metrics-addr", group=OptionGroup.display, metavar="HOST:PORT|off",
        most_used=True,
        help="address of the Prometheus metrics; the next free port if it is taken",
    )  # fmt: skip
    on_end: str | None = option(
        None, "--on-end", group=OptionGroup.display, metavar="COMMAND",
        help="shell command to run after the run has finished, stopped or failed; its standard input is a"
        " JSON object with the outcome. Its failure is a warning, and it is killed after a minute (default:"
        " none)",
    )  # fmt: skip
    notify: str = option(
        "", "--notify", group=OptionGroup.display, metavar="URL|FILE",
        help='send faults, recoveries and the end of the run as Slack\'s {"text": ...} to this address, or to'
        " the one in a file, which `ps` and run.json do not show (default: none)",
    )  # fmt: skip
    heartbeat_url: str = option(
        "", "--heartbeat-url", group=OptionGroup.display, metavar="URL|FILE",
        help="request this address at most once a minute while steps are committed, for a dead-man's switch"
        " (default: none)",
    )  # fmt: skip


def declared() -> Iterator[tuple[Option, Any]]:
    """Yield every option of ours with its default: of the launch, of the core, and of the features."""
    core = (LaunchOptions, RunConfig, DeadlineOptions, Timeouts)
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
    add_torchruns(parser.add_argument_group(TORCHRUN_TITLE, TORCHRUN))
    return parser


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


MODULE_OPTIONS = ("-m", "--module")
OF_ACCELERATE = {
    "--num-processes": "the ranks of this host are --nproc-per-node N",
    "--num-machines": "the number of hosts is --nnodes N",
    "--config-file": "an accelerate configuration is --accelerate-config FILE",
    "--multi-gpu": "leave it out: --nproc-per-node N or an --accelerate-config FILE decides",
    "--mixed-precision": "set bf16 or fp16 in the script, or give an --accelerate-config FILE",
}
"""Options of `accelerate launch`, and what is given here instead."""


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
        if instead := OF_ACCELERATE.get(name.replace("_", "-")):
            raise UsageError(f"no option {name}; {instead}")
        near = difflib.get_close_matches(name.replace("_", "-"), sorted(self._names), 1)
        hint = f"did you mean {near[0]}?" if near else "see grpo-run launch --help"
        raise UsageError(f"no option {name}; {hint}")

    def identity(self, arguments: Sequence[str]) -> list[str]:
        """Return the words that identify the run: the script or `-m` with a module, and its arguments.

        Options are left out: a run that is continued with another time limit is the same run. A script's path
        is relative to the working directory, without symbolic links, so that `train.py` and `./train.py` are
        one script.
        """
        words = list(arguments)
        module: list[str] = []
        while option := self.next_option(words):
            if option[0] in MODULE_OPTIONS:
                module = ["-m"]
        words = words[1:] if words[:1] == ["--"] else words
        if not words or module:
            return [*module, *words]
        return [os.path.relpath(os.path.realpath(words[0])), *words[1:]]
