"""The history of a run, replayed from its journal: attempts, steps, checkpoints, recoveries.

The supervisor replays the journal when it starts, so that counters survive a restart of the supervisor, and
then applies event by event. `grpo-run status` and the metrics replay the same journal. Pure: takes records,
does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.history.memory_findings import MemoryFindings
from grpo_run.runtime.history.no_trainer_script import NoTrainerScript
from grpo_run.runtime.history.progress import (
    LostCheckpoints,
    MemoryRestarts,
    StepTimes,
    mean_time_between_failures,
)
from grpo_run.runtime.history.quarantine import Quarantine
from grpo_run.runtime.history.recovery import (
    Checkpoint,
    Recovery,
    apply_action,
    apply_mismatch,
    apply_progress,
    apply_resumed,
)
from grpo_run.runtime.history.rewards import RewardRecord
from grpo_run.runtime.history.sample_masking import MaskedSamples
from grpo_run.runtime.history.totals import CheckpointTotals, RankTotals
from grpo_run.runtime.history.train_calls import KnownCall, TrainCalls
from grpo_run.runtime.history.wall_states import WallState, WallStates
from grpo_run.runtime.memory.plan import MemoryRecord
from grpo_run.watchdog.learning_rules import GuardResponse, LearningGuard
from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import Durations

BEFORE_START = ("rank_counted",)
"""Events that a supervisor writes before it takes a run over: the run's time does not begin with them."""
ENDED = {EXIT_FINISHED: "finished", EXIT_STOPPED: "stopped"}
"""State of a run that has ended, by its exit code; with any other code it has failed."""


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
    ranks_stopped: bool = False
    """Whether a rank of the present attempt has exited after an agreed stop."""
    phases: dict[PhaseKey, Durations] = field(default_factory=dict)
    """How long phases and callbacks took so far."""
    unreadable: int = 0
    injections_fired: list[str] = field(default_factory=list)
    steps: StepTimes = field(default_factory=StepTimes)
    calls: TrainCalls = field(default_factory=TrainCalls)
    """The run's `train()` calls."""
    masked: MaskedSamples = field(default_factory=MaskedSamples)
    """Samples that were excluded from the loss."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Prompts that are replaced."""
    fresh_because: str = ""
    """Why ranks of this launch cannot be forked from the warm interpreter; found by a rank of an earlier
    attempt.
    """
    no_trainer: NoTrainerScript = field(default_factory=NoTrainerScript)
    """What the script trains by itself, with no Trainer and no loop."""
    rewards: RewardRecord = field(default_factory=RewardRecord)
    """The run's reward functions."""
    memory: MemoryRecord = field(default_factory=MemoryRecord)
    """What has been changed so that the run needs less memory."""
    memory_restarts: MemoryRestarts = field(default_factory=MemoryRestarts)
    memory_trace: MemoryFindings = field(default_factory=MemoryFindings)
    """What `--memory-trace` has found."""
    growth: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Phases and callbacks that have cost more and more: by name, how many times as much as at the beginning,
    and the sentence.
    """
    resume_mismatches: int = 0
    """How often an attempt repeated or left out work that the run has a checkpoint of."""
    guard_trips: Counter[str] = field(default_factory=Counter)
    """How often each learning guard has tripped, by name."""
    nonfinite_refused: int = 0
    """How often a step was refused because its loss or gradient was not finite."""
    ranks: RankTotals = field(default_factory=RankTotals)
    """What ranks have counted in attempts that have ended."""
    checkpoints: CheckpointTotals = field(default_factory=CheckpointTotals)
    wall: WallStates = field(default_factory=WallStates)
    """When the run began, and what its wall time was spent on."""
    snapshot_interval: int | None = None
    """Steps between snapshots in memory, as rank 0 chose it last; None before."""
    tracker_runs: dict[str, str] = field(default_factory=dict)
    """The names of the runs that trackers such as wandb have opened, by opening."""
    _before_checkpoint: bool = False
    """Whether the present attempt began before `checkpoint`, which is damaged, set aside or unwanted then."""

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> History:
        """Replay a whole journal."""
        history = cls()
        for record in records:
            history.apply(record)
        return history

    def apply(self, record: dict[str, Any]) -> None:
        """Apply one journal record. Unknown events are ignored; records without valid fields are counted."""
        time = record.get("time") or 0.0
        if not isinstance(time, (int, float)):
            self.unreadable += 1
            return
        event = record["event"]
        handler = getattr(self, f"_on_{event}", None)
        try:
            if event not in BEFORE_START:
                self.wall.apply(record, time, self.best_position)
            if handler is not None:
                handler(record, time)
            elif event in _FORWARDED:
                _FORWARDED[event](self, record)
        except (LookupError, TypeError, ValueError, ArithmeticError):
            self.unreadable += 1  # truncated to its header, or written by another version

    def _on_run_started(self, record: dict[str, Any], time: float) -> None:
        self.run_id = record.get("run") or self.run_id
        if self.ended_early is not None:
            self.calls.reopen()
        self.supervisors += 1
        self.recoveries_at_start = len(self.recoveries)
        self.fresh_because = ""
        if record.get("accept_change"):
            self.calls.forget_left()  # the script may decide otherwise now
        if self.exit_code == EXIT_GAVE_UP:
            self._reset_budget()  # the user has started the run again after it was given up
        self.exit_code = None
        self.completed = False
        self.sentence = ""
        self.state = "starting"
        self.steps.interrupt()

    def _on_fresh_interpreters(self, record: dict[str, Any], time: float) -> None:
        self.fresh_because = str(record["reason"])

    def _on_state_changed(self, record: dict[str, Any], time: float) -> None:
        self.state = record["to"]

    def _on_attempt_started(self, record: dict[str, Any], time: float) -> None:
        self.attempts = max(self.attempts, int(record["attempt"]) + 1)
        self.ranks_stopped = False
        self.steps.interrupt()
        self.committed_in_attempt = 0
        self.no_trainer.apply_attempt_started()
        self.calls.apply_attempt_started(record, time)

    def _on_resume_chosen(self, record: dict[str, Any], time: float) -> None:
        self.calls.apply_resume_chosen(record)
        if record.get("mismatch"):
            self._mismatch(str(record["mismatch"]))

    def _on_resume_missed(self, record: dict[str, Any], time: float) -> None:
        self._mismatch(str(record["mismatch"]))

    def _mismatch(self, text: str) -> None:
        self.resume_mismatches += 1
        apply_mismatch(self.recoveries, text)

    def _on_train_started(self, record: dict[str, Any], time: float) -> None:
        if record.get("rank") not in (0, None):
            return
        call, resumed = int(record["train_call"]), int(record.get("step") or 0)
        self.train_call, self.target_steps = call, int(record.get("target_steps") or 0)
        self._before_checkpoint = self.checkpoint is not None and (call, resumed) < self.checkpoint.position
        self.steps.begin(call, resumed, time)
        self.calls.apply_train_started(record, time)
        self.no_trainer.apply_train_started()
        apply_resumed(self.recoveries, call, resumed)

    def _on_step_committed(self, record: dict[str, Any], time: float) -> None:
        step, call = int(record["step"]), int(record.get("train_call") or self.train_call)
        at = float(record.get("committed_at") or time)
        self.steps.commit(call, step, at)
        self.step, self.train_call = step, call
        self.committed_in_attempt += 1
        self.calls.apply_step_committed(call, step)
        self.best_position = max(self.best_position, (call, step))
        if record.get("target_steps"):
            self.target_steps = int(record["target_steps"])
        apply_progress(self.recoveries, at)

    def _on_phase_learned(self, record: dict[str, Any], time: float) -> None:
        key = record.get("callback") or Phase[record["phase"]]
        self.phases[key] = Durations.from_json(record["durations"])  # with those of earlier records

    def _on_growth_found(self, record: dict[str, Any], time: float) -> None:
        self.growth[str(record["phase"])] = float(record["factor"]), str(record["sentence"])

    def _on_trains_without_trainer(self, record: dict[str, Any], time: float) -> None:
        if self.no_trainer.apply_noted(record):
            apply_progress(self.recoveries, time)

    def _on_script_checkpoint(self, record: dict[str, Any], time: float) -> None:
        if self.no_trainer.apply_saved(record, time):
            self._reset_budget()

    def _on_step_logged(self, record: dict[str, Any], time: float) -> None:
        for name in ("reward", "loss"):
            if record.get(name) is not None:
                setattr(self, name, float(record[name]))
        self.rewards.apply_logged(record)

    def _on_checkpoint_published(self, record: dict[str, Any], time: float) -> None:
        call, step = int(record.get("train_call") or 0), int(record["step"])
        # a run that ends writes its newest snapshot first, and an older scheduled checkpoint after it
        if self.checkpoint is None or self._before_checkpoint or (call, step) >= self.checkpoint.position:
            self._before_checkpoint = False
            self.checkpoint = Checkpoint(
                step=step, path=record["path"], verified=bool(record.get("verified")), train_call=call
            )
        self._record_save(record)
        self.checkpoints.apply_published(record, time)
        self.checkpoint_trouble = None
        if record.get("scheduled"):
            self.scheduled_call = call
        if self.exit_code is not None:
            self.snapshot_step = None  # the snapshot that a full disk had kept in memory is on disk now
        self.calls.apply_saved(call, step, record["path"])
        self.lost.apply_published(record)
        self._progressed(call, step)

    def _on_checkpoint_staged(self, record: dict[str, Any], time: float) -> None:
        # it survives the ranks, and is made loadable before the next attempt
        self.snapshot_step = int(record["step"])
        self._record_save(record)
        self.calls.apply_saved(int(record.get("train_call") or 0), self.snapshot_step, None)
        self._progressed(int(record.get("train_call") or 0), int(record["step"]))

    def _record_save(self, record: dict[str, Any]) -> None:
        seconds = record.get("seconds")
        self.save_seconds = float(seconds) if seconds is not None else None

    def _on_snapshot_interval(self, record: dict[str, Any], time: float) -> None:
        self.snapshot_interval = int(record["steps"])

    def _on_checkpoint_failed(self, record: dict[str, Any], time: float) -> None:
        self.checkpoint_trouble = str(record.get("reason"))
        self.checkpoints.apply_failed(record)
        self.lost.apply_failed(record)

    def _on_checkpoint_rejected(self, record: dict[str, Any], time: float) -> None:
        self.checkpoints.apply_rejected()
        self.lost.apply_failed(record)

    def _on_model_saved(self, record: dict[str, Any], time: float) -> None:
        self.saved_model = self.train_call, str(record["path"])

    def _progressed(self, call: int, step: int) -> None:
        position = (self.calls.lineage(call), step)
        if position > self.highest_checkpoint:
            self.highest_checkpoint = position
            self._reset_budget()

    def _reset_budget(self) -> None:
        self.recoveries_at_progress = len(self.recoveries)

    def _on_incident(self, record: dict[str, Any], time: float) -> None:
        # also a script that loads its checkpoint itself, before it calls `train()`
        resuming = self.calls.resuming or (bool(record.get("starting")) and self.calls.awaited)
        self.recoveries.append(Recovery.of(record, time, self.train_call, resuming=resuming))
        self.rewards.apply_incident(record)

    def _on_guard_tripped(self, record: dict[str, Any], time: float) -> None:
        guard, response = str(record["guard"]), record.get("response")
        self.guard_trips[guard] += 1
        if guard == LearningGuard.nonfinite and response in (GuardResponse.stop, GuardResponse.roll_back):
            self.nonfinite_refused += 1

    def _on_rolled_back(self, record: dict[str, Any], time: float) -> None:
        self.calls.apply_rolled_back(int(record["train_call"]), int(record["step"]))
        self.recoveries[-1].rolled_back = True

    def _on_fault_injected(self, record: dict[str, Any], time: float) -> None:
        self.injections_fired.append(str(record.get("injection")))

    def _on_rank_completed(self, record: dict[str, Any], time: float) -> None:
        self.ranks_stopped |= record.get("exit_code") == EXIT_STOPPED

    def _on_warning(self, record: dict[str, Any], time: float) -> None:
        self.warnings += 1

    def _on_reward_worker_replaced(self, record: dict[str, Any], time: float) -> None:
        self.rewards.replaced += 1

    def _on_rewards_repeated(self, record: dict[str, Any], time: float) -> None:
        self.masked.repeated_rewards += 1

    def _on_memory_short(self, record: dict[str, Any], time: float) -> None:
        self.memory_restarts.short += 1

    def _on_run_ended(self, record: dict[str, Any], time: float) -> None:
        self.exit_code = record.get("exit_code")
        if self.exit_code is not None:
            # a script that trains by itself may end a stop with any code
            self.state = "stopped" if record.get("stopped") else ENDED.get(self.exit_code, "failed")
        if (
            self.exit_code == EXIT_GAVE_UP
            and self.recoveries
            and self.recoveries[-1].recovery_seconds is None
        ):
            self.recoveries[-1].gave_up = True
        self.completed = bool(record.get("completed", self.finished))
        if not record.get("snapshots_kept"):
            self.snapshot_step = None  # all snapshots needed are on disk, and the memory is freed
        self.sentence = record.get("sentence") or ""

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


_FORWARDED: dict[str, Callable[[History, dict[str, Any]], None]] = {
    "sample_masked": lambda history, record: history.masked.apply_sample_masked(record),
    "group_masked": lambda history, record: history.masked.apply_group_masked(record),
    "prompt_quarantined": lambda history, record: history.quarantine.apply(record),
    "reward_moved": lambda history, record: history.rewards.apply_moved(record),
    "reward_failed": lambda history, record: history.rewards.apply_failed(record),
    "reward_latency": lambda history, record: history.rewards.apply_latency(record),
    "memory_finding": lambda history, record: history.memory_trace.apply_found(record),
    "memory_snapshot": lambda history, record: history.memory_trace.apply_snapshot(record),
    "plan_changed": lambda history, record: history.memory.apply(record),
    "memory_plan_given": lambda history, record: history.memory.apply_given(record),
    "rank_counted": lambda history, record: history.ranks.apply(record),
    "rank_started": lambda history, record: history.calls.apply_rank_started(record),
    "train_restored": lambda history, record: history.calls.apply_train_restored(record),
    "loop_left": lambda history, record: history.calls.apply_loop_left(record),
    "train_ended": lambda history, record: history.calls.apply_train_ended(record),
    "memory_restart": lambda history, record: history.memory_restarts.apply_restart(record),
    "state_saved": lambda history, record: history.no_trainer.apply_state_saved(record),
    "nan_read_as_none": lambda history, record: history.masked.apply_nan_read_as_none(record),
    "action": lambda history, record: apply_action(history.recoveries, record),
    "tracker_run": lambda history, record: history.tracker_runs.update(
        {str(record["opening"]): str(record["name"])}
    ),
}
"""Events that concern one part of the history only."""
