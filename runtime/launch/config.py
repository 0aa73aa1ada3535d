"""Configuration of a run: one frozen object, with the options that set it.

`runtime.launching` makes it of a request, the supervisor reads it, `run.json` records it, and `RankSettings`
carries it to every rank. A field that an option sets declares it (`option.py`), and its
default is the option's. What features add is in `features`, as their modules of settings declare it. The
classes check their values when they are built; they do not parse command lines.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

PathText = Annotated[Path, pydantic.PlainSerializer(str, return_type=str)]
STOP_SECONDS = 300.0
"""Default of `--stop-timeout`."""
_BOUNDS = DeadlineSettings()
RankSet = Annotated[frozenset[int], pydantic.PlainSerializer(sorted, return_type=list[int])]


class Output(str, enum.Enum):
    """How the output of the shown ranks is shown; standard output decides."""

    lines = "lines"
    """On a terminal: their lines, with the rank before each."""
    merged = "merged"
    """In a pipe or a file that takes standard error too: byte for byte, in the order of a rank's writes."""
    apart = "apart"
    """In a pipe or a file: byte for byte, standard output and error each on ours."""


def _limit(default: float | None, name: str, help_text: str) -> Any:
    """Declare a field that is a limit in seconds."""
    return option(default, name, group=OptionGroup.limits, metavar="SECONDS", kind=float, help=help_text)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits in seconds.

    Raises:
        ConfigError: a limit is not above 0.
    """

    handler_seconds: float = 30.0
    """Ranks of a script with no Trainer and no loop have this long after SIGTERM when a stop is requested;
    torchrun grants as much (`--stop-timeout`, if it is given)."""
    vote_seconds: float = _limit(1800.0, "--vote-timeout", "time limit of one vote among the ranks")
    """A vote that takes longer raises an error in the ranks that wait."""
    stop_seconds: float = _limit(
        STOP_SECONDS, "--stop-timeout",
        "time that ranks have to save and exit after a stop request (default:"
        f" {STOP_SECONDS:g}; {handler_seconds:g} after SIGTERM to a script with no Trainer and no loop)",
    )  # fmt: skip
    """Ranks that have not saved and exited this long after a stop request are killed."""

    @property
    def stop_is_given(self) -> bool:
        """Whether `--stop-timeout` was given, which sets both limits of a stop."""
        return self.stop_seconds == self.handler_seconds

    def __post_init__(self) -> None:
        names = {
            "vote_seconds": "--vote-timeout",
            "stop_seconds": "--stop-timeout",
            "handler_seconds": "--stop-timeout",
        }
        for name, flag in names.items():
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag} {getattr(self, name):g}: must be above 0 seconds")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit on consecutive failures.

    Raises:
        ConfigError: the limit is negative.
    """

    failures_without_progress: int = 3
    """Number of failures in a row, without a newer checkpoint, that are recovered; the next one ends the run.
    """

    def __post_init__(self) -> None:
        if self.failures_without_progress < 0:
            raise ConfigError(f"--max-restarts must be 0 or more, not {self.failures_without_progress}")


class NamedSettings(Protocol):
    """A class of a feature's settings: a frozen dataclass whose fields declare options."""

    NAME: ClassVar[str]


FeatureSettings = TypeVar("FeatureSettings", bound=NamedSettings)


def _snapshot_every(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ConfigError(f"--snapshot-every {text}: give a number of steps, 0 for none, or auto")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class DeadlineOptions:
    """The bounds of deadlines that have an option; None for the default of `DeadlineSettings`."""

    floor_seconds: float | None = _limit(
        None, "--deadline-floor",
        "shortest time without progress that counts as a hang; a third of it for a stopped or stuck"
        f" interpreter (default: {_BOUNDS.floor_seconds:g})",
    )  # fmt: skip
    ceiling_seconds: float | None = _limit(
        None, "--deadline-ceiling",
        "longest time without progress allowed beyond observed durations; must be above"
        f" --vote-timeout (default: {_BOUNDS.ceiling_seconds:g})",
    )  # fmt: skip
    first_seconds: float | None = _limit(
        None, "--deadline-first",
        "time without progress allowed in the first occurrence of a phase (default:"
        f" {_BOUNDS.first_seconds:g})",
    )  # fmt: skip
    exit_seconds: float | None = _limit(
        None, "--deadline-exit",
        "time an idle process may take to exit after the script's last line (default:"
        f" {_BOUNDS.exit_seconds:g}, or {_BOUNDS.exit_connected_seconds:g} while a process that it may wait"
        " for is alive)",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The settings of a run that have an option.

    Raises:
        ConfigError: a value is out of range.
    """

    fresh: bool = option(
        False, "--fresh", group=OptionGroup.run, most_used=True,
        help="start a new run of this command, also into an output directory with checkpoints of another run"
        " (default: continue the last run of this command)",
    )  # fmt: skip
    """Whether training may start over in an output directory with unfinished checkpoints of another run."""
    resume_from: str | None = option(
        None, "--resume-from", group=OptionGroup.run, metavar="RUN_ID|DIR", most_used=True,
        help="start from the newest checkpoint of another run, or from one checkpoint directory; has no"
        " effect once the run has a checkpoint of its own, so add --fresh to go back to an older checkpoint"
        " of the same run",
    )  # fmt: skip
    """Run id, run directory or checkpoint directory to start from."""
    require_resume: bool = option(
        False, "--require-resume", group=OptionGroup.run,
        help="end the run with exit code 93 if a restarted script repeats or leaves out a train() call that"
        " this run has a checkpoint of (default: warn, and count it in grpo_resume_mismatches_total)",
    )  # fmt: skip
    """Whether the run ends rather than repeat or leave out work that it has a checkpoint of."""
    preload: bool = option(
        True, "--no-preload", group=OptionGroup.run,
        help="start ranks as fresh interpreters (default: fork them from a process that has imported torch,"
        " transformers and trl)",
    )  # fmt: skip
    """Whether ranks are forked from a process that has imported torch, transformers and trl."""
    keep: tuple[str, ...] = option(
        (), "--keep", group=OptionGroup.run, metavar="NAME", repeated=True, read=tuple,
        help="do not terminate processes of this name that the script has started (default: terminate all"
        " that it has started, before a restart and after the run). NAME is a process's name as in `ps -o"
        " comm`, or a shell pattern for its whole command line as in `ps -o args`, such as '*redis-server*';"
        " its child processes are kept too. May be repeated",
    )  # fmt: skip
    """Names and patterns of processes that ranks start and that are not ended with them."""
    snapshot_every: int | None = option(
        None, "--snapshot-every", group=OptionGroup.training, metavar="STEPS|auto", read=_snapshot_every,
        most_used=True,
        help="steps between snapshots of the training state in memory; 0 for none; auto balances their cost"
        " against the cost of a fault (default: auto)",
    )  # fmt: skip
    """Optimizer steps between snapshots in memory; None to choose the interval at run time, 0 for never."""
    keep_every: int = option(
        0, "--keep-every", group=OptionGroup.training, metavar="STEPS", kind=int,
        help="keep a checkpoint every so many steps, which is not deleted, and record every step, so that"
        " `grpo-run replay` can do a step again and compare it; 0 for none",
    )  # fmt: skip
    """Optimizer steps between checkpoints that are not deleted; 0 for none."""
    cleanup_every: int = option(
        10, "--cleanup-every", group=OptionGroup.training, metavar="STEPS", kind=int,
        help="steps after which to consider collecting garbage and releasing cached GPU memory, at the same"
        " step on all ranks; 0 for never",
    )  # fmt: skip
    """Optimizer steps after which it is considered whether freeing memory pays; 0 for never."""

    def __post_init__(self) -> None:
        if self.cleanup_every < 0:
            raise ConfigError(f"--cleanup-every must be 0 (never) or more, not {self.cleanup_every}")
        if self.keep_every < 0:
            raise ConfigError(f"--keep-every must be 0 (none) or more, not {self.keep_every}")
        if self.snapshot_every is not None and self.snapshot_every < 0:
            raise ConfigError(
                f"--snapshot-every must be 0 (never), 1 or more, or auto, not {self.snapshot_every}"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """Configuration of a run.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    run_id: str
    run_directory: PathText
    target: str
    """Path of the script, or the name of a module when `module` is true."""
    module: bool
    arguments: tuple[str, ...]
    """Arguments of the script."""
    command: tuple[str, ...]
    """Words of the command line that identify the run: the same words resume the same run."""
    series: str = ""
    """The run id without the number that `--fresh` appends."""
    environment: Annotated[dict[str, str], pydantic.Field(exclude=True)] = field(
        default_factory=dict, repr=False
    )
    """Environment variables of the ranks. Never recorded, because it may hold secrets."""
    budget: Budget = field(default_factory=Budget)
    timeouts: Timeouts = field(default_factory=Timeouts)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)
    """Bounds of the hang detector's deadlines."""
    snapshot_directory: PathText | None = None
    """Staging directory on a file system in memory; None to write checkpoints directly to disk."""
    output_root: PathText | None = None
    """In which calls write, whatever output directories the script names; None for these (a replay)."""
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of features that the user has given, as JSON values, by the feature's name; see `of`."""
    expected_distributed_type: str | None = None
    """accelerate's `DistributedType` that the accelerate configuration file asks for."""
    shown_ranks: RankSet = frozenset()
    """Ranks whose output is shown."""
    output: Output = Output.lines
    """How it is shown."""
    rank_cpus: tuple[tuple[int, ...], ...] = ()
    """CPUs that each local rank may use (`--numa-binding`); empty for those of this process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # otherwise the hang detector would kill ranks that are about to report their own timeout
        if not self.deadlines.ceiling_seconds > self.timeouts.vote_seconds:
            raise ConfigError(
                f"--deadline-ceiling {self.deadlines.ceiling_seconds:g}: must be above --vote-timeout"
                f" ({self.timeouts.vote_seconds:g} s), because the hang detector watches votes too"
            )

    def of(self, settings: type[FeatureSettings]) -> FeatureSettings:
        """Return the settings of a feature, with the defaults of what the user has not given.

        Args:
            settings: the class of the feature, whose `NAME` is the feature's.
        """
        adapter: pydantic.TypeAdapter[FeatureSettings] = _adapter(settings)
        return adapter.validate_python(self.features.get(settings.NAME, {}))

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the environment."""
        fields: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return fields


_ADAPTER = pydantic.TypeAdapter(RunConfig)


@functools.cache
def _adapter(settings: type[FeatureSettings]) -> pydantic.TypeAdapter[FeatureSettings]:
    return pydantic.TypeAdapter(settings)
