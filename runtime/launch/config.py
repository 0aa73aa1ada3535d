"""Configuration of a run: one frozen object, declared here and nowhere else.

`cli.launching` parses the command line into it, the supervisor reads it, `run.json` records it, and
`RankSettings` carries it to every rank. All defaults of the command line are the defaults of these fields.
The classes check their values when they are built; they do not parse command lines.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injections import Injection, parse_injection
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.watchdog.learning_rules import Rules
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

InjectionText = Annotated[
    Injection,
    pydantic.PlainValidator(lambda value: value if isinstance(value, Injection) else parse_injection(value)),
    pydantic.PlainSerializer(str, return_type=str),
]
"""An injection, encoded as its canonical text."""
PathText = Annotated[Path, pydantic.PlainSerializer(str, return_type=str)]
CAPPED_ENDS = ("length", "repetition", "deadline")
"""How a cap ends a completion."""
RankSet = Annotated[frozenset[int], pydantic.PlainSerializer(sorted, return_type=list[int])]


class Output(str, enum.Enum):
    """How the output of the shown ranks is shown; standard output decides."""

    lines = "lines"
    """On a terminal: their lines, with the rank before each."""
    merged = "merged"
    """In a pipe or a file that takes standard error too: byte for byte, in the order of a rank's writes."""
    apart = "apart"
    """In a pipe or a file: byte for byte, standard output and error each on ours."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits in seconds.

    Raises:
        ConfigError: a limit is not above 0.
    """

    vote_seconds: float = 1800.0
    """A vote that takes longer raises an error in the ranks that wait (`--vote-timeout`)."""
    stop_seconds: float = 300.0
    """Ranks that have not saved and exited this long after a stop request are killed (`--stop-timeout`)."""
    handler_seconds: float = 30.0
    """Ranks of a script with no Trainer and no loop have this long after SIGTERM when a stop is requested;
    torchrun grants as much (`--stop-timeout`, if it is given)."""
    tool_seconds: float = 240.0
    """An asynchronous tool of an agent is cancelled after this time, which is less than a rank may wait for a
    process outside the job (`--tool-timeout`)."""

    @property
    def stop_is_given(self) -> bool:
        """Whether `--stop-timeout` was given, which sets both limits of a stop."""
        return self.stop_seconds == self.handler_seconds

    def __post_init__(self) -> None:
        names = {
            "vote_seconds": "--vote-timeout",
            "stop_seconds": "--stop-timeout",
            "handler_seconds": "--stop-timeout",
            "tool_seconds": "--tool-timeout",
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


@dataclass(frozen=True, kw_only=True)
class MaskingSettings:
    """Which samples leave baseline and loss, besides those without a valid reward, and when rewards are
    repeated.

    Raises:
        ConfigError: a value is out of range.
    """

    repeat_rewards_above: float = 0.5
    """Share of a rollout's samples without a valid reward above which its rewards are computed once more
    (`--repeat-rewards-above`); 1 for never."""
    masked_ends: tuple[str, ...] = ("repetition", "deadline")
    """Completions that a cap has cut for these reasons are masked (`--mask-capped`)."""

    def __post_init__(self) -> None:
        if not 0 <= self.repeat_rewards_above <= 1:
            raise ConfigError(
                f"--repeat-rewards-above {self.repeat_rewards_above:g}: must be a share from 0 to 1 (never)"
            )
        unknown = [end for end in self.masked_ends if end not in CAPPED_ENDS]
        if unknown:
            raise ConfigError(
                f"--mask-capped {','.join(unknown)}: give none, or some of {', '.join(CAPPED_ENDS)}"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
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
    preload: bool = True
    """Whether ranks are forked from a process that has imported torch, transformers and trl."""
    budget: Budget = field(default_factory=Budget)
    timeouts: Timeouts = field(default_factory=Timeouts)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)
    """Bounds of the hang detector's deadlines."""
    injections: tuple[InjectionText, ...] = ()
    """Faults to inject."""
    strict_faults: bool = False
    """Whether a run in which an injected fault never happened has failed."""
    cleanup_every: int = 10
    """Optimizer steps after which it is considered whether freeing memory pays; 0 for never."""
    snapshot_every: int | None = None
    """Optimizer steps between snapshots in memory; None to choose the interval at run time, 0 for never."""
    snapshot_directory: PathText | None = None
    """Staging directory on a file system in memory; None to write checkpoints directly to disk."""
    generation: dict[str, int | float] = field(default_factory=dict)
    """Fields of the script's GRPO or RLOO configuration that the run overrides."""
    log_completions: int = 0
    """How many groups of each rollout ranks keep in the run directory (`--log-completions`)."""
    memory_trace: bool = False
    """Whether ranks trace what keeps their memory alive (`--memory-trace`)."""
    memory_plan: MemoryPlan = field(default_factory=MemoryPlan)
    """What is changed from the first attempt on so that less memory is needed (`--memory-plan`)."""
    reward_workers: int = 0
    """Worker processes of each rank that run its reward functions; 0 to run them in the rank."""
    reward_timeout_seconds: float | None = None
    """Longest time of one call of a reward function in a worker; None to learn it."""
    allow_degrade: bool = False
    """Whether the memory plan may change the experiment when nothing else is left (`--allow-degrade`)."""
    masking: MaskingSettings = field(default_factory=MaskingSettings)
    """Which samples leave baseline and loss."""
    guards: Rules = field(default_factory=Rules)
    """What the learning guards do."""
    resume_from: str | None = None
    """Run id, run directory or checkpoint directory to start from."""
    fresh: bool = False
    """Whether training may start over in an output directory with unfinished checkpoints of another run."""
    on_resume_failure: str = "stop"
    """What follows if the script fails when it resumes: `stop`, or `fresh` for a new run."""
    starts_over: int = 0
    """How many runs of this command before this one could not be resumed."""
    require_resume: bool = False
    """Whether the run ends rather than repeat or leave out work that it has a checkpoint of."""
    expected_distributed_type: str | None = None
    """accelerate's `DistributedType` that the accelerate configuration file asks for."""
    keep: tuple[str, ...] = ()
    """Names and patterns of processes that ranks start and that are not ended with them."""
    shown_ranks: RankSet = frozenset()
    """Ranks whose output is shown."""
    output: Output = Output.lines
    """How it is shown."""
    rank_cpus: tuple[tuple[int, ...], ...] = ()
    """CPUs that each local rank may use (`--numa-binding`); empty for those of this process."""

    def __post_init__(self) -> None:
        counts = {
            "--cleanup-every must be 0 (never)": self.cleanup_every,
            "--log-completions must be 0 (none)": self.log_completions,
            "--reward-workers must be 0 (none)": self.reward_workers,
        }
        for rule, count in counts.items():
            if count < 0:
                raise ConfigError(f"{rule} or more, not {count}")
        if self.snapshot_every is not None and self.snapshot_every < 0:
            raise ConfigError(
                f"--snapshot-every must be 0 (never), 1 or more, or auto, not {self.snapshot_every}"
            )
        if self.reward_timeout_seconds is not None and not 0 < self.reward_timeout_seconds < float("inf"):
            raise ConfigError(f"--reward-timeout {self.reward_timeout_seconds:g}: must be above 0 seconds")
        # otherwise the hang detector would kill ranks that are about to report their own timeout
        if not self.deadlines.ceiling_seconds > self.timeouts.vote_seconds:
            raise ConfigError(
                f"--deadline-ceiling {self.deadlines.ceiling_seconds:g}: must be above --vote-timeout"
                f" ({self.timeouts.vote_seconds:g} s), because the hang detector watches votes too"
            )

    @property
    def may_start_over(self) -> bool:
        """Whether a new run follows if this one cannot be resumed; the restart budget bounds how often in a
        row."""
        return self.on_resume_failure == "fresh" and self.starts_over < self.budget.failures_without_progress

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the environment."""
        fields: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return fields


_ADAPTER = pydantic.TypeAdapter(RunConfig)
