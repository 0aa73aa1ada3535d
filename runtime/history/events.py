"""The events of the run itself: its lifecycle, steps, checkpoints and faults.

What is replayed from other events stands beside them: totals in `totals.py`, and so on.
`history.py` lists all that a history is made of. Written by the supervisor and the ranks. Fields are those of
the file, so a name that is in use stays; a field with a default may be missing in a journal that another
release has begun. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from grpo_run.runtime.event import Event
from grpo_run.watchdog.rank_metrics import LOGGED


class RunStarted(Event, kw_only=True):
    """A supervisor has taken the run over.

    Attributes:
        accept_change: the user lets a changed script continue the run.
    """

    supervisor_pid: int = 0
    world_size_local: int | None = None
    accept_change: bool = False


class RunEnded(Event, kw_only=True):
    """The supervisor ends the run.

    Attributes:
        snapshots_kept: snapshots that are not on disk stay in memory.
        completed: the script of every rank ran to its end.
        stopped: on request.
    """

    exit_code: int | None = None
    sentence: str | None = ""
    snapshots_kept: bool = False
    completed: bool | None = None
    stopped: bool = False


class StateChanged(Event, kw_only=True):
    """The lifecycle has another state. The values are those of `lifecycle.py`."""

    before: str = msgspec.field(default="", name="from")
    state: str = msgspec.field(name="to")
    because: str = ""


class StopRequested(Event, kw_only=True):
    """The ranks are asked to agree on a step, save and exit."""

    why: str


class WarningGiven(Event, kw_only=True, tag="warning"):
    """A sentence for the user.

    Attributes:
        shown: a rank has written it, and the supervisor shows it.
    """

    text: str = ""
    shown: bool = False


class AdviceGiven(WarningGiven, kw_only=True, tag="advice"):
    """What the user could change so that a healthy run takes less time; once in a run for each subject."""

    subject: str


class Suspicion(Event, kw_only=True):
    """A possible fault is being confirmed."""

    sentence: str = ""


class AttemptStarted(Event, kw_only=True):
    """Ranks are about to be started. `node` is this node's rank in the rendezvous."""

    world_size: int | None = None
    node: int | None = None


class AttemptEnded(Event, kw_only=True):
    """It was decided what follows the attempt."""

    cause: str = ""
    action: str = ""


class RankStarted(Event, kw_only=True):
    """The process of a rank runs."""

    rank: int
    pid: int


class RankCompleted(Event, kw_only=True):
    """The script of a rank has come to its end."""

    exit_code: int | None = None


class RankCounted(Event, kw_only=True):
    """What a rank has counted in an attempt that has ended, see `totals.py`.

    Attributes:
        phases: by name, the histogram of its durations.
    """

    rank: int
    attempt: int
    counts: dict[str, float]
    phases: dict[str, dict[str, Any]]


class FreshInterpreters(Event, kw_only=True):
    """Ranks of this launch cannot be forked from the warm interpreter."""

    reason: str


class TrainStarted(Event, kw_only=True):
    """A `train()` call begins, at a step above 0 if it is resumed.

    Attributes:
        trainer_class, output_dir, settings: by which the call is recognized; None if an older release wrote
            the event.
        replaces: the call that was lost, if this one begins from step 0 in its place.
    """

    train_call: int
    target_steps: int | None = None
    trainer_class: str | None = None
    output_dir: str = ""
    settings: str | None = ""
    replaces: int | None = 0


class TrainEnded(Event, kw_only=True):
    """A call ran to its end."""

    train_call: int


class TrainRestored(Event, kw_only=True):
    """A call that had finished is restored from its last checkpoint without training."""

    train_call: int


class LoopLeft(Event, kw_only=True):
    """A rank has left a hand-written loop before its end, after so many steps."""

    rank: int
    train_call: int
    ends_after: int


class ResumeChosen(Event, kw_only=True):
    """Rank 0 has chosen what the call about to begin resumes from.

    Attributes:
        path: of the checkpoint; None to begin from step 0.
        expected_step: of the newest checkpoint that the run had of the call.
        mismatch: how the call does not continue what the run has; None if it does.
    """

    train_call: int | None = None
    trainer_class: str = ""
    output_dir: str = ""
    path: str | None = None
    expected_step: int = 0
    in_memory: bool = False
    mismatch: str | None = None


class ResumeMissed(Event, kw_only=True):
    """The run has ended without a call that it has a checkpoint of."""

    mismatch: str


class RolledBack(Event, kw_only=True):
    """Checkpoints from `before_step` on were set aside; the newest that is left is of `step`.

    Attributes:
        snapshots: steps of the snapshots in memory that were discarded.
        renamed: paths that the checkpoints on disk have now.
    """

    step: int
    train_call: int
    before_step: int | None = None
    snapshots: Sequence[int] = ()
    renamed: Sequence[str] = ()


class StepCommitted(Event, kw_only=True):
    """All ranks have voted on a step, at `committed_at` in seconds since the epoch.

    Attributes:
        tokens, completions: that this host's ranks have generated in the attempt until then; None for none.
    """

    step: int
    train_call: int | None = None
    target_steps: int | None = None
    committed_at: float | None = None
    tokens: int | None = None
    completions: int | None = None


if TYPE_CHECKING:
    _Metrics = Event
else:
    _Metrics = msgspec.defstruct(
        "_Metrics", [(row.field, float | None, None) for row in LOGGED], bases=(Event,), kw_only=True
    )


class StepLogged(_Metrics, kw_only=True, omit_defaults=True):
    """What rank 0 has logged of a step: the rows of `watchdog/rank_metrics.py` that it has a number for.

    Attributes:
        reward_functions: mean and standard deviation of each reward function.
        clipped: shares of clipped tokens by side, as TRL names them: `low_mean`, `high_mean`, `high_max`.
    """

    train_call: int | None = None
    reward: float | None = None
    loss: float | None = None
    reward_functions: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    clipped: Mapping[str, float] = msgspec.field(default_factory=dict)


class PhaseLearned(Event, kw_only=True):
    """How long a phase or callback took so far, from which later attempts derive its deadline."""

    phase: str
    callback: str | None = None
    durations: dict[str, Any]


class PhaseCosts(Event, kw_only=True):
    """The mean seconds of a step over the last steps, by phase or callback."""

    step: int
    train_call: int
    seconds: dict[str, float]


class SnapshotInterval(Event, kw_only=True):
    """Rank 0 has chosen the steps between snapshots in memory, from what is known of costs and failures."""

    steps: int
    cost_seconds: float | None = None
    step_seconds: float | None = None
    failure_seconds: float | None = None


class CheckpointStaged(Event, kw_only=True):
    """A snapshot is in memory. `seconds` is how long the ranks waited for it."""

    step: int
    train_call: int | None = None
    scheduled: bool = False
    seconds: float | None = None


class CheckpointPublished(Event, kw_only=True):
    """A checkpoint is on disk.

    Attributes:
        rank: that has written it itself; None if the drain worker has.
        scheduled: the script has asked for it.
        kept: the user has asked for it.
        best: folder name of the script's best checkpoint so far.
        keeps: how many scheduled checkpoints `save_total_limit` keeps, this one included; None for all.
        removed: older checkpoints that rotation has deleted.
    """

    step: int
    train_call: int | None = None
    path: str
    verified: bool = False
    scheduled: bool = False
    kept: bool = False
    size_bytes: int | None = None
    seconds: float | None = None
    best: str | None = None
    keeps: int | None = None
    removed: Sequence[str] = ()


class CheckpointFailed(Event, kw_only=True):
    """A checkpoint could not be written. `lost` if the script has scheduled it, and it is not tried again."""

    cause: str = ""
    reason: str | None = None
    path: str = ""
    train_call: int | None = None
    lost: bool = False


class CheckpointRejected(Event, kw_only=True):
    """A checkpoint is not used or not written. `moved_to` is where it was renamed to."""

    path: str = ""
    reason: str | None = None
    cause: str | None = None
    moved_to: str | None = None
    train_call: int | None = None
    lost: bool = False


class ModelSaved(Event, kw_only=True):
    """The script has saved its model with `save_model`."""

    path: str


class IncidentConfirmed(Event, kw_only=True, tag="incident"):
    """A fault, with its verdict.

    Attributes:
        phase: in which it happened, in words.
        incident: the folder of the evidence.
        failed_at: in seconds since the epoch.
        guard: what the rank told that ended the attempt on purpose, see `Alarm.details`.
        failed_reward, shortage: parts of the verdict.
    """

    train_call: int | None = None
    cause: str
    culprit: int | None = None
    phase: str | None = None
    lost_connection: Sequence[int] = ()
    also_failed: Sequence[int] = ()
    sentence: str | None = ""
    signature: str | None = ""
    repeat_key: str | None = ""
    starting: bool | None = False
    origin: str | None = None
    failed_reward: dict[str, Any] | None = None
    incident: str | None = None
    failed_at: float | None = None
    guard: dict[str, Any] | None = None
    shortage: dict[str, Any] | None = None
    detection_seconds: float | None = None


class ActionChosen(Event, kw_only=True, tag="action"):
    """What follows the last incident, see `recovery.Decision`."""

    action: str
    reason: str | None = ""
    patient: bool = False
    delay_seconds: float = 0.0
    before_step: int | None = None
    fresh_from: int | None = None


class MemoryCleaned(Event, kw_only=True, tag="cleanup"):
    """All ranks have collected garbage (`garbage`) or given cached memory back (`caches`)."""

    garbage: bool
    caches: bool
    seconds: float
    freed_bytes: int = 0
    freed_device_bytes: int = 0
    released_bytes: int = 0
    collected: int = 0


class MemoryShort(Event, kw_only=True):
    """Memory of the host has become short."""

    sentence: str = ""


class MemoryFreed(Event, kw_only=True):
    """Snapshots that are on disk were freed, because memory is short."""

    size_bytes: int


def step_logged(metrics: Mapping[str, float], **fields: Any) -> StepLogged:
    """Return the event of a step whose metrics are given by their names in the table."""
    return msgspec.convert({"event": "step_logged", **metrics, **fields}, StepLogged)
