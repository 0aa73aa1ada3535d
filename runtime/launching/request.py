"""What is asked of a launch, and what has become of it: `RunRequest` and `RunResult`.

A program makes a `RunRequest` and calls `launch` with it; the command line is parsed into one. Its settings
are frozen dataclasses, whose fields declare the options of the command line, so a program and a command set
the same values under the same names. Checks nothing (`_configuration.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.launch.config import DeadlineOptions, NamedSettings, Output, RunOptions, Timeouts
from grpo_run.runtime.launch.option import OptionGroup, option
from grpo_run.runtime.launching.torchrun import TorchrunOptions

if TYPE_CHECKING:
    from grpo_run.runtime.history.status import RunStatus


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
        help="ranks whose output is shown: none, all, or numbers as 0,1 (default: on a terminal rank 0's"
        " lines, without progress bars and logged metrics; all in a pipe or a file, as under torchrun;"
        " warnings and events are always shown)",
    )  # fmt: skip
    on_end: str | None = option(
        None, "--on-end", group=OptionGroup.display, metavar="COMMAND",
        help="shell command to run after the run has finished, stopped or failed; its standard input is a"
        " JSON object with the outcome. Its failure is a warning, and it is killed after a minute (default:"
        " none)",
    )  # fmt: skip
    notify: str = option(
        "", "--notify", group=OptionGroup.display, metavar="URL|FILE", repr=False,
        help='send faults, recoveries and the end of the run as Slack\'s {"text": ...} to this address, or to'
        " the one in a file, which `ps` and run.json do not show (default: none)",
    )  # fmt: skip
    heartbeat_url: str = option(
        "", "--heartbeat-url", group=OptionGroup.display, metavar="URL|FILE", repr=False,
        help="request this address at most once a minute while steps are committed, for a dead-man's switch"
        " (default: none)",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to start, or to continue: the script with its arguments, and the settings.

    Attributes:
        target: path of the script, or the name of a module if `module` is true.
        arguments: of the script.
        torchrun: torchrun's options, such as the number of ranks.
        launch: where the run is, and who is told of it.
        options: of the run.
        features: settings of features, at most one object of each class in `feature_settings()`; a feature
            that is left out has its defaults.
        output: how the output of shown ranks is shown.
        typed: the words of the command, which `grpo-run resume` starts again; None without a command.
        output_root: in which calls write, whatever output directories the script names; None for these.
    """

    target: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    torchrun: TorchrunOptions = field(default_factory=TorchrunOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    options: RunOptions = field(default_factory=RunOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    deadlines: DeadlineOptions = field(default_factory=DeadlineOptions)
    features: tuple[NamedSettings, ...] = ()
    output: Output = Output.lines
    typed: tuple[str, ...] | None = field(default=None, repr=False)
    output_root: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a launch has ended.

    Attributes:
        exit_code: as of `grpo-run launch`; `runtime/errors.py` has the codes.
        state: `finished`, `stopped` to be continued by the same request, or `failed`.
        sentence: how the run ended, as the user is told.
        run_directory: with the journal, logs, incidents and reports.
        status: of the run; None if nothing was supervised, because it had ended before, or it cannot be read.
    """

    exit_code: int
    state: str
    sentence: str
    run_id: str
    run_directory: Path
    status: RunStatus | None = field(default=None, repr=False)
