"""The options of `grpo-run launch` and its help: torchrun's and ours, and where the script begins among the
words.

`-h` shows the most used options, `--help` all of them: ours by group, torchrun's, exit codes, examples.
torchrun's are declared in `_torchrun.py`. Options come before the script; every word after it belongs to the
script, even if it looks like an option. Used by `command.py`, and by the commands that pass options on:
`train` and `resume`. Checks no value (`_values.py`).
"""

from __future__ import annotations

import argparse
import copy
import difflib
import os
from collections.abc import Sequence
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching._torchrun import add_torchruns
from grpo_run.cli.launching._values import HELP as MEMORY_PLAN_HELP
from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.launch import generation_caps as caps
from grpo_run.runtime.launch.config import CAPPED_ENDS, MaskingSettings, RunConfig, Timeouts
from grpo_run.runtime.launch.guard_options import GRAMMAR as GUARD_GRAMMAR
from grpo_run.runtime.launch.injections import GRAMMAR, help_text
from grpo_run.watchdog.learning_rules import GuardResponse, LearningGuard
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

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
MOST_USED = (
    "--nproc-per-node", "--module", "--accelerate-config", "--run-id", "--fresh", "--accept-change",
    "--resume-from", "--max-restarts", "--snapshot-every", "--generation", "--guard", "--show-ranks",
    "--metrics-addr",
)  # fmt: skip
"""Options that `-h` shows."""


def _shortened(action: argparse.Action) -> argparse.Action:
    """Return an option with one spelling of its long name, and the first clause of its help."""
    short = copy.copy(action)
    short.option_strings = [name for name in action.option_strings if "_" not in name]
    short.help = (action.help or "").partition(";")[0].partition(" (default")[0]
    return short


class _ShortHelp(argparse.Action):
    """Print the most used options and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        actions = {name: action for action in parser._actions for name in action.option_strings}
        short = _empty_parser(SHORT_EXAMPLES)
        group = short.add_argument_group("most used options")
        for name in MOST_USED:
            group._add_action(_shortened(actions[name]))
        short.print_help()
        parser.exit()


class _Inject(argparse.Action):
    """Collect injections; `--inject help` lists their kinds and exits, as `--help` does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        if values == "help":
            print(help_text())
            parser.exit()
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])


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
    """Return our options, and torchrun's after them."""
    parser = _empty_parser(f"{EXIT_CODES}\n\n{EXAMPLES}")
    parser.add_argument("-h", action=_ShortHelp, nargs=0, help="show the most used options and exit")
    parser.add_argument("--help", action="help", help="show all options and exit")
    _add_run(parser.add_argument_group("run"))
    _add_checkpoints(parser.add_argument_group("checkpoints and training"))
    _add_limits(parser.add_argument_group("hang detection and time limits (seconds)"))
    _add_display(parser.add_argument_group("display"))
    _add_injection(parser.add_argument_group("fault injection"))
    add_torchruns(parser.add_argument_group(TORCHRUN_TITLE, TORCHRUN))
    return parser


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--run-id",
        metavar="ID",
        help="name of the run (default: the script's name and a digest of its path, its arguments and the"
        " working directory)",
    )
    group.add_argument(
        "--run-dir",
        metavar="DIR",
        help="directory of the journal, logs and incidents, created with mode 0700; a directory that other"
        " users can write causes a warning (default: runs/ID)",
    )
    group.add_argument(
        "--fresh",
        action="store_true",
        help="start a new run of this command, also into an output directory with checkpoints of another run"
        " (default: continue the last run of this command)",
    )
    group.add_argument(
        "--accept-change",
        action="store_true",
        help="continue a run although its script, a file that it has imported or that its arguments name,"
        " SEED, or an option that affects training has changed (default: refuse)",
    )
    group.add_argument(
        "--resume-from",
        metavar="RUN_ID|DIR",
        help="start from the newest checkpoint of another run, or from one checkpoint directory; has no"
        " effect once the run has a checkpoint of its own, so add --fresh to go back to an older checkpoint"
        " of the same run",
    )
    group.add_argument(
        "--require-resume",
        action="store_true",
        help="end the run with exit code 93 if a restarted script repeats or leaves out a train() call that"
        " this run has a checkpoint of (default: warn, and count it in grpo_resume_mismatches_total)",
    )
    group.add_argument(
        "--on-resume-failure",
        choices=("stop", "fresh"),
        default=RunConfig.on_resume_failure,
        help="what follows if the script raises the same exception twice while it resumes: stop ends the run"
        " with exit code 93; fresh starts a new run, in a new run directory and with new output directories;"
        " what the old one has written stays (default: %(default)s)",
    )
    group.add_argument(
        "--accelerate-config", metavar="FILE", help="apply a configuration file of `accelerate launch`"
    )
    group.add_argument(
        "--no-preload",
        action="store_true",
        help="start ranks as fresh interpreters (default: fork them from a process that has imported torch,"
        " transformers and trl)",
    )
    group.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME",
        help="do not terminate processes of this name that the script has started (default: terminate all"
        " that it has started, before a restart and after the run). NAME is a process's name as in `ps -o"
        " comm`, or a shell pattern for its whole command line as in `ps -o args`, such as '*redis-server*';"
        " its child processes are kept too. May be repeated",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--snapshot-every",
        default="auto",
        metavar="STEPS|auto",
        help="steps between snapshots of the training state in memory; 0 for none; auto balances their cost"
        " against the cost of a fault (default: %(default)s)",
    )
    group.add_argument(
        "--snapshot-dir",
        default=str(SHARED_MEMORY_ROOT),
        metavar="DIR|off",
        help="file system in memory that holds snapshots and checkpoints on their way to disk; off: training"
        " waits for the disk (default: %(default)s)",
    )
    _add_memory(group)
    _add_generation(group)
    _add_rewards(group)
    group.add_argument(
        "--guard",
        action="append",
        default=[],
        metavar=GUARD_GRAMMAR,
        help=f"response to an alarm of a guard: {', '.join(GuardResponse)}, for {', '.join(LearningGuard)};"
        " roll-back repeats from a checkpoint before the onset, once exactly and once with fresh samples,"
        " then stops; may be repeated (default: nonfinite=roll-back, the others warn)",
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cleanup-every",
        type=int,
        default=RunConfig.cleanup_every,
        metavar="STEPS",
        help="steps after which to consider collecting garbage and releasing cached GPU memory, at the same"
        " step on all ranks; 0 for never (default: %(default)s)",
    )
    group.add_argument(
        "--allow-degrade",
        action="store_true",
        help="after an out-of-memory error, shorten completions when no change of the memory plan is left"
        " that keeps the update (default: end the run and propose it)",
    )
    group.add_argument(
        "--memory-plan",
        metavar="NAME[=VALUE],...",
        help=f"use less memory for the same update: {', '.join(MEMORY_PLAN_HELP)} (default: what the script"
        " has set, until a rank runs out of memory)",
    )
    group.add_argument(
        "--memory-trace",
        action="store_true",
        help="name what keeps memory that grows from step to step: the line that created it and the object"
        " that holds it; steps take up to twice as long",
    )


def _add_generation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generation",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"cap generation: {', '.join(caps.KEYS)}; may be repeated",
    )
    group.add_argument(
        "--log-completions",
        type=int,
        default=RunConfig.log_completions,
        metavar="N",
        help="keep N groups of each rollout, with their rewards, in the run directory for `grpo-run serve`,"
        " at most 16 MiB for each rank (default: %(default)s)",
    )


def _add_rewards(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--reward-workers",
        type=int,
        default=RunConfig.reward_workers,
        metavar="N",
        help="run the reward functions of each rank in N worker processes, where a hanging call is killed,"
        " and only the samples that it fails on are excluded (default: %(default)s; a function that has"
        " failed twice at one step is moved to a worker in any case)",
    )
    group.add_argument(
        "--reward-timeout",
        type=float,
        metavar="SECONDS",
        help="longest time of one call of a reward function in a worker (default: learned, below the hang"
        " detector's)",
    )
    group.add_argument(
        "--mask-capped",
        default=",".join(MaskingSettings.masked_ends),
        metavar="ENDS|none",
        help="completions to leave out of baseline and loss, by how a cap has ended them:"
        f" {', '.join(CAPPED_ENDS)} (default: %(default)s)",
    )
    group.add_argument(
        "--repeat-rewards-above",
        type=float,
        default=MaskingSettings.repeat_rewards_above,
        metavar="SHARE",
        help="compute the rewards of a rollout once more if more than this share of its samples has no valid"
        " reward; 1 for never (default: %(default)g)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    bounds = DeadlineSettings()
    meanings = {
        "floor": "shortest time without progress that counts as a hang; a third of it for a stopped or stuck"
        f" interpreter (default: {bounds.floor_seconds:g})",
        "ceiling": "longest time without progress allowed beyond observed durations; must be above"
        f" --vote-timeout (default: {bounds.ceiling_seconds:g})",
        "first": "time without progress allowed in the first occurrence of a phase (default:"
        f" {bounds.first_seconds:g})",
        "exit": "time an idle process may take to exit after the script's last line (default:"
        f" {bounds.exit_seconds:g}, or {bounds.exit_connected_seconds:g} while a process that it may wait"
        " for is alive)",
    }
    for word, meaning in meanings.items():
        group.add_argument(f"--deadline-{word}", type=float, metavar="SECONDS", help=meaning)
    group.add_argument(
        "--vote-timeout",
        type=float,
        default=Timeouts.vote_seconds,
        metavar="SECONDS",
        help="time limit of one vote among the ranks (default: %(default)g)",
    )
    group.add_argument(
        "--stop-timeout",
        type=float,
        metavar="SECONDS",
        help="time that ranks have to save and exit after a stop request (default:"
        f" {Timeouts.stop_seconds:g}; {Timeouts.handler_seconds:g} after SIGTERM to a script with no Trainer"
        " and no loop)",
    )
    group.add_argument(
        "--tool-timeout",
        type=float,
        default=Timeouts.tool_seconds,
        metavar="SECONDS",
        help="time after which an asynchronous tool of an agent is cancelled; the model is shown the error"
        " (default: %(default)g)",
    )


def _add_display(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--show-ranks",
        metavar="RANKS",
        help="ranks whose output is shown: none, all, or numbers as 0,1 (default: none on a terminal; all in"
        " a pipe or a file, as under torchrun; warnings and events are always shown)",
    )
    group.add_argument(
        "--metrics-addr",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT|off",
        help="address of the Prometheus metrics; the next free port if it is taken (default: %(default)s)",
    )
    group.add_argument(
        "--on-end",
        metavar="COMMAND",
        help="shell command to run after the run has finished, stopped or failed; its standard input is a"
        " JSON object with the outcome. Its failure is a warning, and it is killed after a minute (default:"
        " none)",
    )
    group.add_argument(
        "--notify",
        default="",
        metavar="URL|FILE",
        help='send faults, recoveries and the end of the run as Slack\'s {"text": ...} to this address, or to'
        " the one in a file, which `ps` and run.json do not show (default: none)",
    )
    group.add_argument(
        "--heartbeat-url",
        default="",
        metavar="URL|FILE",
        help="request this address at most once a minute while steps are committed, for a dead-man's switch"
        " (default: none)",
    )


def _add_injection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--inject",
        action=_Inject,
        default=[],
        metavar=GRAMMAR.partition("[")[0],
        help=f"inject one fault into one rank, once in the run: {GRAMMAR}; may be repeated; `--inject help`"
        " lists the kinds",
    )
    group.add_argument(
        "--strict-faults",
        action="store_true",
        help="end with exit code 93 if an injected fault never happened (default: say so at the end)",
    )


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
