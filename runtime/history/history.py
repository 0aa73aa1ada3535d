"""The history of a run, replayed from its journal: attempts, steps, checkpoints, recoveries.

The supervisor replays the journal when it starts, so that counters survive a restart of the supervisor, and
then applies event by event. `grpo-run status` and the metrics replay the same journal. Pure: takes events,
does no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from grpo_run.runtime.charts import Chart
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.event import Event, EventDecoder, Unread
from grpo_run.runtime.history.events import (
    ActionChosen,
    AdviceGiven,
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointPublished,
    CheckpointRejected,
    CheckpointStaged,
    FreshInterpreters,
    IncidentConfirmed,
    LoopLeft,
    MemoryShort,
    ModelSaved,
    PhaseCosts,
    PhaseLearned,
    RankCompleted,
    RankCounted,
    RankStarted,
    ResumeChosen,
    ResumeMissed,
    RolledBack,
    RunEnded,
    RunStarted,
    SnapshotInterval,
    StateChanged,
    StepCommitted,
    StepLogged,
    StopRequested,
    TrainEnded,
    TrainRestored,
    TrainStarted,
    WarningGiven,
)
from grpo_run.runtime.history.no_trainer_script import NoTrainerScript, TrainsWithoutTrainer
from grpo_run.runtime.history.progress import LostCheckpoints, StepTimes, mean_time_between_failures
from grpo_run.runtime.history.recovery import (
    Checkpoint,
    Recovery,
    apply_action,
    apply_mismatch,
    apply_progress,
    apply_resumed,
)
from grpo_run.runtime.history.totals import CheckpointTotals, RankTotals, RewardCalls, RewardTotals
from grpo_run.runtime.history.train_calls import KnownCall, TrainCalls
from grpo_run.runtime.history.wall_states import WallState, WallStates
from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import Durations

ENDED = {EXIT_FINISHED: "finished", EXIT_STOPPED: "stopped"}
"""State of a run that has ended, by its exit code; with any other code it has failed."""


class HistoryPart:
    """What one feature replays from its events. Without more than these, it shows nothing.

    Attributes:
        EVENTS: their types; also events of the core, which are applied there first.
        CHARTS: what the live page and the report draw of them.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]]
    CHARTS: ClassVar[tuple[Chart, ...]] = ()

    def drawn(self, event: Any, /) -> Mapping[str, float]:
        """Return what one of its events adds to lines of its charts at the event's step, by their keys."""
        return {}

    def apply(self, event: Any, /) -> None:
        """Take one of these events."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """Return fields of the object that `grpo-run status --json` prints."""
        return {}

    def without_gradient(self) -> Mapping[str, float]:
        """Return how many steps have taught nothing, by why."""
        return {}

    def facts(self) -> Mapping[str, str]:
        """Return what is in effect, by name, for `grpo-run status`, reports and pages; "" for nothing."""
        return {}

    def notes(self) -> Sequence[str]:
        """Return lines for `grpo-run status` and reports."""
        return ()

    def beside(self, phases: Collection[Phase]) -> Mapping[str, str]:
        """Return what runs beside the ranks, by name, with the name of the phase that the live page shows.

        Args:
            phases: that are open in ranks.
        """
        return {}

    def ended(self) -> Sequence[str]:
        """Return sentences for the end of the run, and for the report of an incident."""
        return ()

    def pace(self) -> Sequence[str]:
        """Return sentences on the pace of the run, for `grpo-run status` and the report."""
        return ()


AnyPart = TypeVar("AnyPart", bound=HistoryPart)


@dataclass(kw_only=True)
class History:
    """State of a run after the events applied so far. `apply` is the only method that changes it.

    Positions are pairs (train call, step). `attempts` and `supervisors` are counts;
    `unreadable` counts records that could not be interpreted.
    """

    run_id: str = ""
    state: str = "starting"
    train_call: int = 0
    step: int = 0
    target_steps: int = 0
    attempts: int = 0
    node: int = 0
    """The number of this host among those of the last attempt."""
    world_size: int = 0
    """Ranks of all hosts in the last attempt; 0 before the first."""
    checkpoint: Checkpoint | None = None
    """The furthest checkpoint that was published since the present attempt began, or before if it resumed
    there.
    """
    snapshot_step: int | None = None
    """Step of the newest snapshot in memory; None once the memory is freed."""
    save_seconds: float | None = None
    """How long the last save took: to memory, or of its file to disk; None before the first."""
    saved_model: tuple[int, str] | None = None
    """The call after which the script has saved its model with `save_model`, and where; None if it has
    not.
    """
    scheduled_call: int = 0
    """The last call of which a checkpoint that the script scheduled is on disk; 0 if there is none."""
    lost: LostCheckpoints = field(default_factory=LostCheckpoints)
    """Checkpoints that the script has scheduled and that are not on its disk."""
    completed: bool = False
    """Whether the script of every rank ran to its end, whatever is on disk."""
    checkpoint_trouble: str | None = None
    """Why checkpoints cannot be written to disk; None while they can."""
    recoveries: list[Recovery] = field(default_factory=list)
    exit_code: int | None = None
    sentence: str = ""
    warnings: int = 0
    advice: dict[str, str] = field(default_factory=dict)
    """What the user was told to change so that the run takes less time, by subject."""
    reward: float | None = None
    loss: float | None = None
    best_position: tuple[int, int] = (0, 0)
    """The furthest committed position of all attempts."""
    highest_checkpoint: tuple[int, int] = (0, 0)
    """The furthest position ever checkpointed. The restart budget refills when it rises."""
    recoveries_at_progress: int = 0
    """How many of `recoveries` came before the last progress."""
    recoveries_at_start: int = 0
    """How many of `recoveries` an earlier supervisor has handled."""
    committed_in_attempt: int = 0
    """How many commits the present attempt has had; steps that follow each other fast share one."""
    supervisors: int = 0
    times_lost: int = 0
    """How often this host's supervisor has ended without an end of the run, with ranks on other hosts."""
    ranks_stopped: bool = False
    """Whether a rank of the present attempt has exited after an agreed stop."""
    phases: dict[PhaseKey, Durations] = field(default_factory=dict)
    """How long phases and callbacks took so far."""
    unreadable: int = 0
    steps: StepTimes = field(default_factory=StepTimes)
    calls: TrainCalls = field(default_factory=TrainCalls)
    """The run's `train()` calls."""
    fresh_because: str = ""
    """Why ranks of this launch cannot be forked from the warm interpreter; found by a rank of an earlier
    attempt.
    """
    no_trainer: NoTrainerScript = field(default_factory=NoTrainerScript)
    """What the script trains by itself, with no Trainer and no loop."""
    rewards: RewardTotals = field(default_factory=RewardTotals)
    """The run's reward functions."""
    memory_shortages: int = 0
    """How often memory of the host has become short."""
    resume_mismatches: int = 0
    """How often an attempt repeated or left out work that the run has a checkpoint of."""
    ranks: RankTotals = field(default_factory=RankTotals)
    """What ranks have counted in attempts that have ended."""
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
    wall: WallStates = field(default_factory=WallStates)
    """When the run began, and what its wall time was spent on."""
    snapshot_interval: int | None = None
    """Steps between snapshots in memory, as rank 0 chose it last; None before."""
    parts: tuple[HistoryPart, ...] = ()
    """What features replay from events of their own."""
    _before_checkpoint: bool = False
    """Whether the present attempt began before `checkpoint`, which is damaged, set aside or unwanted then."""

    def __post_init__(self) -> None:
        self._takers: dict[type[Event], list[HistoryPart]] = defaultdict(list)
        for part in self.parts:
            for kind in part.EVENTS:
                self._takers[kind].append(part)

    @classmethod
    def of(cls, events: Iterable[Event], parts: Iterable[HistoryPart] = ()) -> History:
        """Replay a whole journal."""
        history = cls(parts=tuple(parts))
        for event in events:
            history.apply(event)
        return history

    def apply(self, event: Event) -> None:
        """Apply one event of the journal. Unknown events are ignored; damaged ones are counted."""
        if isinstance(event, Unread) and event.damaged:
            self.unreadable += 1
            return
        try:
            if not isinstance(event, RankCounted):  # written before a supervisor takes the run over
                self.wall.apply(event, self.best_position)
            self._apply(event)
        except (LookupError, TypeError, ValueError, ArithmeticError):
            self.unreadable += 1  # a value that this release does not know

    def _apply(self, event: Event) -> None:
        match event:
            case StepCommitted():
                self._step_committed(event)
            case StepLogged():
                self._step_logged(event)
            case CheckpointStaged():
                self._checkpoint_staged(event)
            case CheckpointPublished():
                self._checkpoint_published(event)
            case CheckpointFailed():
                self.checkpoint_trouble = str(event.reason)
                self.checkpoints.apply_failed(event)
                self.lost.apply_failed(event)
            case CheckpointRejected():
                self.checkpoints.apply_rejected()
                self.lost.apply_failed(event)
            case SnapshotInterval():
                self.snapshot_interval = event.steps
            case ModelSaved():
                self.saved_model = self.train_call, event.path
            case RunStarted():
                self._run_started(event)
            case RunEnded():
                self._run_ended(event)
            case StateChanged():
                self.state = event.state
            case AttemptStarted():
                self._attempt_started(event)
            case FreshInterpreters():
                self.fresh_because = event.reason
            case WarningGiven():
                self.warnings += 1
                if isinstance(event, AdviceGiven):
                    self.advice[event.subject] = event.text
            case RankStarted():
                self.calls.apply_rank_started(event)
            case RankCompleted():
                self.ranks_stopped |= event.exit_code == EXIT_STOPPED
            case RankCounted():
                self.ranks.apply(event)
            case TrainStarted():
                self._train_started(event)
            case TrainEnded():
                self.calls.apply_train_ended(event)
            case TrainRestored():
                self.calls.apply_train_restored(event)
            case LoopLeft():
                self.calls.apply_loop_left(event)
            case ResumeChosen():
                self.calls.apply_resume_chosen(event)
                if event.mismatch:
                    self._mismatch(event.mismatch)
            case ResumeMissed():
                self._mismatch(event.mismatch)
            case RolledBack():
                self.calls.apply_rolled_back(event.train_call, event.step)
                self.recoveries[-1].rolled_back = True
            case IncidentConfirmed():
                self._incident(event)
            case ActionChosen():
                apply_action(self.recoveries, event)
            case PhaseLearned():
                # with the durations of earlier records
                self.phases[event.callback or Phase[event.phase]] = Durations.from_json(event.durations)
            case TrainsWithoutTrainer():
                if self.no_trainer.apply_noted(event):
                    apply_progress(self.recoveries, event.time)
            case MemoryShort():
                self.memory_shortages += 1
            case RewardCalls():
                self.rewards.apply(event)
        for part in self.takers(type(event)):
            part.apply(event)

    @property
    def decoder(self) -> EventDecoder:
        """Reads the events that this history is made of."""
        return _decoder(tuple(kind for part in self.parts for kind in part.EVENTS if kind not in EVENTS))

    def part(self, kind: type[AnyPart]) -> AnyPart:
        """Return what a feature has replayed.

        Raises:
            LookupError: the feature does not take part.
        """
        for part in self.parts:
            if isinstance(part, kind):
                return part
        raise LookupError(kind.__name__)

    def takers(self, kind: type[Event]) -> Sequence[HistoryPart]:
        """Return the parts of features that take events of a type."""
        return self._takers.get(kind, ())

    def facts(self) -> dict[str, str]:
        """Return what features have in effect, by name."""
        return {name: text for part in self.parts for name, text in part.facts().items() if text}

    def notes(self) -> list[str]:
        """Return what features have found, as lines."""
        return [note for part in self.parts for note in part.notes()]

    def ended(self) -> list[str]:
        """Return what features say at the end of the run, and in the report of an incident."""
        return [sentence for part in self.parts for sentence in part.ended()]

    def pace(self) -> list[str]:
        """Return what is said of the pace of the run: advice, and what features say."""
        return [*self.advice.values(), *(sentence for part in self.parts for sentence in part.pace())]

    def _run_started(self, event: RunStarted) -> None:
        self.run_id = event.run or self.run_id
        if self.ended_early is not None:
            self.calls.reopen()
        if self.attempts and self.exit_code is None and self.world_size > (event.world_size_local or 0):
            self.times_lost += 1
        self.supervisors += 1
        self.recoveries_at_start = len(self.recoveries)
        self.fresh_because = ""
        if event.accept_change:
            self.calls.forget_left()  # the script may decide otherwise now
        if self.exit_code == EXIT_GAVE_UP:
            self._reset_budget()  # the user has started the run again after it was given up
        self.exit_code = None
        self.completed = False
        self.sentence = ""
        self.state = "starting"
        self.steps.interrupt()

    def _attempt_started(self, event: AttemptStarted) -> None:
        number = _known(event.attempt)
        self.attempts = max(self.attempts, number + 1)
        self.node, self.world_size = event.node or 0, event.world_size or 0
        self.ranks_stopped = False
        self.steps.interrupt()
        self.committed_in_attempt = 0
        self.no_trainer.apply_attempt_started()
        self.calls.apply_attempt_started(number, event.time)

    def _mismatch(self, text: str) -> None:
        self.resume_mismatches += 1
        apply_mismatch(self.recoveries, text)

    def _train_started(self, event: TrainStarted) -> None:
        if event.rank not in (0, None):
            if self.node:  # only rank 0's host is told of checkpoints
                self._progressed(event.train_call, event.step or 0)
            return
        call, resumed = event.train_call, event.step or 0
        self.train_call, self.target_steps = call, event.target_steps or 0
        self._before_checkpoint = self.checkpoint is not None and (call, resumed) < self.checkpoint.position
        self.steps.begin(call, resumed, event.time)
        self.calls.apply_train_started(event)
        self.no_trainer.apply_train_started()
        apply_resumed(self.recoveries, call, resumed)

    def _step_committed(self, event: StepCommitted) -> None:
        step, call = event.step, event.train_call or self.train_call
        at = event.committed_at or event.time
        self.steps.commit(call, step, at)
        self.step, self.train_call = step, call
        self.committed_in_attempt += 1
        self.calls.apply_step_committed(call, step)
        self.best_position = max(self.best_position, (call, step))
        if event.target_steps:
            self.target_steps = event.target_steps
        apply_progress(self.recoveries, at)

    def _step_logged(self, event: StepLogged) -> None:
        self.reward = self.reward if event.reward is None else event.reward
        self.loss = self.loss if event.loss is None else event.loss
        self.rewards.apply_logged(event)

    def _checkpoint_published(self, event: CheckpointPublished) -> None:
        call, step = event.train_call or 0, event.step
        # a run that ends writes its newest snapshot first, and an older scheduled checkpoint after it
        if self.checkpoint is None or self._before_checkpoint or (call, step) >= self.checkpoint.position:
            self._before_checkpoint = False
            self.checkpoint = Checkpoint(step=step, path=event.path, verified=event.verified, train_call=call)
        self.save_seconds = event.seconds
        self.checkpoints.apply_published(event)
        self.checkpoint_trouble = None
        if event.scheduled:
            self.scheduled_call = call
        if self.exit_code is not None:
            self.snapshot_step = None  # the snapshot that a full disk had kept in memory is on disk now
        self.calls.apply_saved(call, step, event.path)
        self.lost.apply_published(event)
        self._progressed(call, step)

    def _checkpoint_staged(self, event: CheckpointStaged) -> None:
        # it survives the ranks, and is made loadable before the next attempt
        call = event.train_call or 0
        self.snapshot_step = event.step
        self.save_seconds = event.seconds
        self.calls.apply_saved(call, event.step, None)
        self._progressed(call, event.step)

    def _progressed(self, call: int, step: int) -> None:
        position = (self.calls.lineage(call), step)
        if position > self.highest_checkpoint:
            self.highest_checkpoint = position
            self._reset_budget()

    def _reset_budget(self) -> None:
        self.recoveries_at_progress = len(self.recoveries)

    def _incident(self, event: IncidentConfirmed) -> None:
        # also a script that loads its checkpoint itself, before it calls `train()`
        resuming = self.calls.resuming or (bool(event.starting) and self.calls.awaited)
        self.recoveries.append(Recovery.of(event, self.train_call, resuming=resuming))

    def _run_ended(self, event: RunEnded) -> None:
        self.exit_code = event.exit_code
        if self.exit_code is not None:
            # a script that trains by itself may end a stop with any code
            self.state = "stopped" if event.stopped else ENDED.get(self.exit_code, "failed")
        if (
            self.exit_code == EXIT_GAVE_UP
            and self.recoveries
            and self.recoveries[-1].recovery_seconds is None
        ):
            self.recoveries[-1].gave_up = True
        self.completed = self.finished if event.completed is None else event.completed
        if not event.snapshots_kept:
            self.snapshot_step = None  # all snapshots needed are on disk, and the memory is freed
        self.sentence = event.sentence or ""

    @property
    def finished(self) -> bool:
        """Whether the script of every rank ran to its end."""
        return self.exit_code == EXIT_FINISHED and self.state != "stopped"

    @property
    def ended_early(self) -> KnownCall | None:
        """The last call, if the script has finished although the call had steps left: the script decides
        anew when it runs again.
        """
        return self.calls.ended_early if self.finished else None

    @property
    def counts_steps(self) -> bool:
        """Whether the script has used a Trainer or the loop, whose steps are counted."""
        return self.train_call > 0 or self.best_position > (0, 0)

    @property
    def failures_without_progress(self) -> int:
        """Failures in a row without a newer checkpoint that count against the restart budget."""
        return sum(one.counts for one in self.recoveries[self.recoveries_at_progress :])

    @property
    def restarting(self) -> bool:
        """Whether the last fault was answered by a restart after which no step has been committed yet."""
        last = self.recoveries[-1] if self.recoveries else None
        return last is not None and last.action.startswith("restart") and last.recovery_seconds is None

    def productive_seconds(self) -> float:
        """Return the seconds spent on steps, each the first time that it was committed."""
        return self.wall.seconds[WallState.productive]

    def step_seconds(self) -> float | None:
        """Return how long a step takes at present, in seconds; None until a few have been committed."""
        return self.steps.typical_seconds(self.train_call)

    def remaining_seconds(self) -> float | None:
        """Return how long the rest of the train() call takes at the present pace; None until known."""
        seconds = self.step_seconds()
        if seconds is None or not self.target_steps:
            return None
        return max(0, self.target_steps - self.step) * seconds

    def mean_time_between_failures(self) -> float:
        """Return the mean seconds between failures so far. Time without a supervisor does not count."""
        return mean_time_between_failures(self.wall.elapsed_seconds(), len(self.recoveries))

    def goodput(self, now: float | None = None) -> float | None:
        """Return the share of wall time spent on productive steps, from 0 to 1.

        None before the first event, and for a script that trains by itself: its steps are not counted.
        Time without a supervisor does not count.

        Args:
            now: seconds since the epoch, for a run that is live; the time of the last event if None.
        """
        if self.wall.first is None or (self.no_trainer.seen and self.best_position == (0, 0)):
            return None
        wall = self.wall.elapsed_seconds(now)
        return min(1.0, max(0.0, self.productive_seconds() / wall)) if wall > 0 else None


def _known(value: int | None) -> int:
    if value is None:
        raise ValueError("the event lacks a number")
    return value


EVENTS: tuple[type[Event], ...] = (
    RunStarted, RunEnded, StateChanged, StopRequested, WarningGiven, AdviceGiven, FreshInterpreters,
    AttemptStarted, AttemptEnded, RankStarted, RankCompleted, RankCounted,
    TrainStarted, TrainEnded, TrainRestored, LoopLeft, ResumeChosen, ResumeMissed, RolledBack,
    StepCommitted, StepLogged, PhaseLearned, PhaseCosts,
    SnapshotInterval, CheckpointStaged, CheckpointPublished, CheckpointFailed, CheckpointRejected, ModelSaved,
    IncidentConfirmed, ActionChosen,
    TrainsWithoutTrainer,
    MemoryShort,
    RewardCalls,
)  # fmt: skip
"""All events that a reader of a run takes as such; others are for people, and for one reader each."""
DECODER = EventDecoder(EVENTS)


@lru_cache(maxsize=4)
def _decoder(own: tuple[type[Event], ...]) -> EventDecoder:
    return EventDecoder((*EVENTS, *own)) if own else DECODER
