"""Types of the metric catalogue: metrics, the labels with their closed sets of values, observations.

Every label is a closed set, one value per local rank, or a bounded number of names of reward functions, so
no content of a journal or board can add series without limit. Causes and actions are listed only if the
code can produce them; unit tests compare the lists with the sources. Used by every module of this folder.
Defines no metric (`catalogue.py`) and performs no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from grpo_run.runtime.features import shown
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.recovery import Action
from grpo_run.runtime.history.rewards import MOST_FUNCTIONS, FailureKind
from grpo_run.runtime.history.sample_masking import MaskingReason
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.history.totals import CheckpointResult
from grpo_run.runtime.history.wall_states import WallState
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.learning_rules import LearningGuard
from grpo_run.watchdog.observation import EndReason, Phase, RankState, Slot
from grpo_run.watchdog.rank_metrics import Unit
from grpo_run.watchdog.stalls.durations import HISTOGRAM_EDGES_SECONDS, Histogram

Kind = Literal["gauge", "counter", "histogram"]
Sample = tuple[tuple[str, ...], float | Histogram | None]
"""Label values in the order of the metric's labels, and the value. None and NaN are not exported."""

HISTOGRAM_SERIES = len(HISTOGRAM_EDGES_SECONDS) + 3
"""One for each edge and for infinity, the sum and the count."""

RUN_ID = "run_id"
"""Label of every series, so that one Prometheus server can hold many runs."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """One label of a metric.

    `values` is the closed set of its values, or None for one value per local rank. With `most`, the values
    are names of the script, at most so many. `exclusive` means that only one value is exported at a time, so
    the label does not multiply the number of series.
    """

    name: str
    values: tuple[str, ...] | None
    most: int = 0
    exclusive: bool = False


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """One successful read of a run, with the time of the read.

    `slots` is indexed by local rank; None stands for a rank that cannot be read. `first_rank` is the global
    rank of local rank 0, which an unreadable slot does not provide.
    """

    status: RunStatus
    slots: tuple[Slot | None, ...]
    first_rank: int
    monotonic_seconds: float
    wall_seconds: float

    def ranks(self) -> Iterator[tuple[str, Slot | None]]:
        """Yield each known rank's label and slot; the slot is None if it cannot be read."""
        for index, slot in enumerate(self.slots):
            yield str(self.first_rank + index if slot is None else slot.rank), slot

    def readable(self) -> Iterator[tuple[str, Slot]]:
        """Yield only the ranks whose slots can be read; the others export no values."""
        for rank, slot in self.ranks():
            if slot is not None:
                yield rank, slot


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """State of the exporter itself. `observed_at` is the wall time of the last successful read, if any."""

    failed: bool
    failures: int
    observed_at: float | None


Source = TypeVar("Source", RunObservation, Exporter)


@dataclass(frozen=True, kw_only=True)
class Metric(Generic[Source]):
    """One metric family. `read` is pure: equal sources give equal samples."""

    name: str
    kind: Kind
    help: str
    unit: Unit
    read: Callable[[Source], Iterator[Sample]]
    labels: tuple[Label, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels in the order of a sample's values, without `run_id`."""
        return tuple(label.name for label in self.labels)

    def max_series(self, local_ranks: int) -> int:
        """Return the largest number of series that one exporter can export for this metric at a time."""
        series = HISTOGRAM_SERIES if self.kind == "histogram" else 1
        for label in self.labels:
            if not label.exclusive:
                series *= label.most or (local_ranks if label.values is None else len(label.values))
        return series


UNKNOWN = "unknown"
UNDECIDED = "undecided"

RUN_STATES = (*(state.value for state in RunState), UNKNOWN)
PHASES = tuple(phase.name for phase in Phase)
MEMORY_PHASES = tuple(
    phase.name
    for phase in (
        Phase.startup,
        Phase.generate,
        Phase.score,
        Phase.forward_backward,
        Phase.optimizer,
        Phase.checkpoint,
        Phase.eval,
    )
)
"""The phases in which a rank allocates much. The memory of the others is in `grpo-run status --json`."""
RANK_STATES = tuple(state.name for state in RankState if state is not RankState.absent)

INCIDENT_CAUSES = (
    Cause.exception,
    Cause.signal,
    Cause.startup_failure,
    Cause.collective_mismatch,
    Cause.collective_missing_rank,
    Cause.rank_exited_early,
    Cause.generation_stall,
    Cause.reward_stall,
    Cause.data_stall,
    Cause.checkpoint_stall,
    Cause.interpreter_stuck,
    Cause.gpu_oom,
    Cause.host_oom,
    Cause.shm_full,
    Cause.no_progress,
    Cause.nonfinite,
    Cause.learning_collapse,
    Cause.unknown,
)
"""The causes a verdict can have. A member of `Cause` that no verdict uses yet is not exported."""

DECIDED_ACTIONS = (Action.restart, Action.restart_from_earlier_checkpoint, *shown("ACTIONS"), Action.stop)
"""The actions the supervisor can decide on, with those of features."""

CAUSES = tuple(cause.value for cause in INCIDENT_CAUSES)
ACTION_NAMES = tuple(map(str, DECIDED_ACTIONS))
RESTART_ACTIONS = tuple(action for action in ACTION_NAMES if action != Action.stop)
ACTIONS = (*ACTION_NAMES, UNDECIDED)

GUARD = Label(name="guard", values=tuple(guard.value for guard in LearningGuard))
END_REASONS = tuple(reason.value for reason in EndReason)

RANK = Label(name="rank", values=None)
RUN_STATE = Label(name="state", values=RUN_STATES)
RANK_STATE = Label(name="state", values=RANK_STATES)
PHASE = Label(name="phase", values=PHASES)
MEMORY_PHASE = Label(name="phase", values=MEMORY_PHASES)
HOST_MEMORY = Label(name="kind", values=("anonymous", "file", "shared", "pinned"))
HELPER = Label(name="helper", values=("data_workers", "other", "grpo_run"))
CAUSE = Label(name="cause", values=CAUSES)
END_REASON = Label(name="reason", values=END_REASONS)
RESTART = Label(name="action", values=RESTART_ACTIONS)
LAST_CAUSE = Label(name="cause", values=CAUSES, exclusive=True)
LAST_ACTION = Label(name="action", values=ACTIONS, exclusive=True)
CULPRIT = Label(name="culprit", values=None, exclusive=True)
AWAITED_RANK = Label(name="rank", values=None, exclusive=True)
AWAITED_PHASE = Label(name="phase", values=PHASES, exclusive=True)
REWARD_FUNCTION = Label(name="function", values=None, most=MOST_FUNCTIONS + 1)
REWARD_FAILURE = Label(name="kind", values=tuple(kind.value for kind in FailureKind))
MOST_GROUPS = 8
"""Process groups with a name of their own; further ones are one."""
GROUP = Label(name="group", values=None, most=MOST_GROUPS + 1)
CHECKPOINT_RESULT = Label(name="result", values=tuple(result.value for result in CheckpointResult))
WALL_STATE = Label(name="state", values=tuple(state.value for state in WallState))
OUTCOMES = ("recovered", "gave_up")
OUTCOME = Label(name="outcome", values=OUTCOMES)
MASKING_REASONS = (*map(str, MaskingReason), *shown("MASKING_REASONS"))
MASKING = Label(name="reason", values=MASKING_REASONS)
VERSION = Label(name="version", values=None, exclusive=True)
