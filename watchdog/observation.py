"""What the supervisor observes of a rank: its slot on the board and how its process exited.

Plain data. Filled by `runtime.board` (slots) and `runtime.processes.ranks` (exits); read by every detector,
metric and page. Does not interpret what it holds and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS


class Phase(IntEnum):
    """What a rank is doing. Phases nest: a reward runs inside `score`, which runs inside `data`."""

    startup = 1
    data = 2
    generate = 3
    reward = 4
    score = 5
    forward_backward = 6
    optimizer = 7
    vote = 8
    checkpoint = 9
    eval = 10
    cleanup = 11
    idle = 12
    weight_sync = 13  # weights are sent to the server or the engine that generates, inside `data`
    callback = 14  # the last one: the numbers from here on are those of callbacks


PhaseKey = Phase | str
"""What durations are learned by: a phase, or the name of one of the user's callbacks."""

SESSION_PHASES = frozenset(
    {Phase.startup, Phase.data, Phase.checkpoint, Phase.eval, Phase.idle, Phase.callback}
)
"""Phases whose work other code or other processes do: I/O of the rank's process tree counts as activity
there, and CPU time says more than in the others, where an endless loop computes as well.
"""
PHASES_AFTER_STEP = frozenset({Phase.checkpoint, Phase.eval, Phase.idle, Phase.callback})
"""Phases that follow a completed step and belong to it, as `checkpoint-7` belongs to step 7."""


class RankState(IntEnum):
    """How far a rank's script has progressed."""

    absent = 0  # the slot was not written in this attempt
    starting = 1  # before the first `train()` call
    training = 2  # inside a `train()` call
    between = 3  # after a `train()` call, before the end of the script
    # the script has run its last line and its threads have ended; a signal from here on is a warning
    done = 4
    failed = 5  # the script raised an exception
    returned = 6  # the script has run its last line; threads that it has started may still run


class EndReason(str, Enum):
    """Why a completion ended."""

    eos = "eos"
    """By itself: with an end-of-sequence token, or by a stopping criterion of the script."""
    length = "length"
    """At `max_completion_length`."""
    repetition = "repetition"
    """It was in a loop, of `LEAST_LOOP_TOKENS` or more."""
    deadline = "deadline"
    """The rollout's time was over."""


LEAST_LOOP_TOKENS = 8
"""Tokens that repeat themselves. Fewer would make loops of lists of equal numbers and of rows of dashes."""
USUAL_LOOP_TOKENS = 128
"""At 64, tables and markup of real text were taken for loops in 0.7 % of samples; at 128 in 0.07 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPhase:
    """A phase that has begun and not ended; `since_seconds` is on the monotonic clock.

    `callback` names the user's callback and its event (`MyCallback.on_step_end`) in a `callback` phase, and
    is "" in any other.
    """

    phase: Phase
    since_seconds: float
    callback: str = ""

    @property
    def key(self) -> PhaseKey:
        """What the durations of this phase are learned by."""
        return self.callback if self.phase is Phase.callback else self.phase


@dataclass(kw_only=True, eq=False, repr=False, slots=True)
class SlotFields:
    """The numbers that a rank publishes in its slot, in the order in which they are there. The rank changes
    its own in place.

    A name that ends in `_ns` holds nanoseconds of this machine's monotonic clock. NaN means never set.
    """

    train_call: int = 0
    step: int = 0
    target_steps: int = 0
    voted_step: int = 0
    committed_step: int = 0
    resumed_step: int = 0
    checkpoint_step: int = 0
    voted_at_ns: int = 0
    train_started_ns: int = 0
    tokens_generated: int = 0
    rewards_scored: int = 0
    votes: int = 0
    cleanup_runs: int = 0
    no_trainer_after: int = 0

    vote_wait_seconds: float = 0.0
    cleanup_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    ended_eos: float = 0.0
    ended_length: float = 0.0
    ended_repetition: float = 0.0
    ended_deadline: float = 0.0
    generation_limit: float = math.nan
    prompt_tokens: float = 0.0
    prompt_length: float = math.nan


@dataclass(kw_only=True, slots=True)
class Slot(SlotFields):
    """One consistent reading of a rank's slot. All times are seconds of this machine's monotonic clock.

    Steps count optimizer steps of the current `train()` call, like `TrainerState.global_step`. `step` is the
    last completed optimizer step, `voted_step` the last step this rank voted on (at `voted_at_seconds`), and
    `committed_step` the last step that it knows every rank voted on. A gauge that was never set is NaN.
    `heartbeat_seconds` is when a thread of the interpreter last ran; `last_work_seconds` is when measurable
    work (a forward pass, tokens, scores) was last done; 0 means never. `collectives_issued` counts the
    collectives issued from Python, the last one at `last_collective_seconds`, and `generation_passes` the
    forward passes in `generate`; one rollout takes about `generation_limit` at most. `heartbeat_thread` is
    the native id of the thread that stamps the heartbeat, 0 if unknown; `idle_threads` are those of other
    Python threads that are idle and wake no thread. `writes` counts updates of the slot. `no_trainer_after`
    is 1 more than the `train()` call after which the script took optimizer steps by itself, 0 if it never
    did. `ended_*` count the completions that ended for each `EndReason`; `prompt_tokens` counts the tokens of
    their prompts, whose mean in the last rollout is `prompt_length`.
    `logged` are the last values that were logged, in the order of `LOGGED_FIELDS`.
    """

    rank: int
    local_rank: int
    pid: int
    attempt: int
    state: RankState
    phases: tuple[OpenPhase, ...]
    last_progress_seconds: float
    writes: int
    heartbeat_seconds: float = 0.0
    last_work_seconds: float = 0.0
    collectives_issued: int = 0
    last_collective_seconds: float = 0.0
    generation_passes: int = 0
    heartbeat_thread: int = 0
    idle_threads: tuple[int, ...] = ()
    logged: tuple[float, ...] = ()

    @property
    def voted_at_seconds(self) -> float:
        """When the rank voted on `voted_step`."""
        return self.voted_at_ns / 1e9

    def value(self, field: str) -> float:
        """Return what `watchdog/rank_metrics.py` lists under this field; NaN if it was never logged."""
        if field in LOGGED_FIELDS:
            return self.logged[LOGGED_FIELDS.index(field)] if self.logged else math.nan
        return float(getattr(self, field))

    @property
    def phase(self) -> Phase | None:
        """The innermost open phase, or None before the first."""
        return self.phases[-1].phase if self.phases else None

    @property
    def generating_since(self) -> float | None:
        """When the open generation began; None outside one."""
        return next((one.since_seconds for one in self.phases if one.phase is Phase.generate), None)

    @property
    def open_phases(self) -> tuple[OpenPhase, ...]:
        """The open phases, outermost first.

        Without any, the script itself runs: before its first `train()` call, or between calls.
        """
        if self.phases:
            return self.phases
        starting = self.state is RankState.starting and not self.trains_without_trainer
        phase = Phase.startup if starting else Phase.idle
        return (OpenPhase(phase=phase, since_seconds=self.last_progress_seconds),)

    def ended(self, reason: EndReason) -> float:
        """How many completions have ended for this reason."""
        return float(getattr(self, f"ended_{reason.value}"))

    @property
    def completions(self) -> float:
        """How many completions have ended."""
        return sum(map(self.ended, EndReason))

    @property
    def began_seconds(self) -> float:
        """When the outermost open phase began; without any, when the rank last made progress."""
        return self.phases[0].since_seconds if self.phases else self.last_progress_seconds

    @property
    def trains_without_trainer(self) -> bool:
        """Whether the script takes optimizer steps with no Trainer and no loop, before, between or after
        `train()` calls.
        """
        return self.no_trainer_after == self.train_call + 1

    @property
    def has_returned(self) -> bool:
        """Whether the script has run its last line."""
        return self.state in (RankState.returned, RankState.done)

    @property
    def runs_script(self) -> bool:
        """Whether the rank runs the script, or its threads after the last line."""
        return self.state in (RankState.starting, RankState.training, RankState.between, RankState.returned)

    @property
    def callback(self) -> str:
        """The user's callback that is running (`MyCallback.on_step_end`), or "" outside callbacks."""
        return next((one.callback for one in reversed(self.phases) if one.phase is Phase.callback), "")


def all_done(slots: Sequence[Slot | None]) -> bool:
    """Whether every rank's script has run its last line, and its threads have ended."""
    return bool(slots) and all(slot is not None and slot.state is RankState.done for slot in slots)


def all_returned(slots: Sequence[Slot | None]) -> bool:
    """Whether every rank's script has run its last line."""
    return bool(slots) and all(slot is not None and slot.has_returned for slot in slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedError:
    """One exception of a chain: an exception, one that it was raised from, or one that was handled when it
    was raised.

    `types` are the full names of its class and base classes, `phases` those in which it was raised; None if
    it has left none. `by_script` says that it was raised in a frame of the
    script, not in Python code of a library.
    """

    types: tuple[str, ...]
    message: str
    phases: tuple[Phase, ...] | None = None
    by_script: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Why all ranks have ended an attempt on purpose, for the verdict.

    `cause` is the value of a `Cause`, `step` the step after which they did, `sentence` what is wrong, as a
    full sentence. Two alarms with the same `signature` are the same. `details` are for who answers it: JSON
    values, which are in the journal and in `verdict.json` as `guard`.
    """

    cause: str
    step: int
    sentence: str
    signature: str
    advice: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """An exception raised by the user's script, as recorded by the rank's bootstrap.

    `location` is the innermost frame outside installed libraries, as (file, line, function). `phases` are
    those in which it was raised, the outermost first, and `callback` the user's callback that ran; the slot
    has left them. None if it was raised in the phases of the slot. `bases` are the full names of its class
    and base classes, and of those of the exceptions that it was raised from; `chain` has each of them and
    itself, which comes first. `own_steps` counts the optimizer steps that the script had taken with no
    Trainer and no loop. `alarm` says why all ranks have ended the attempt on purpose. `root` is the exception
    at the end of the chain that it was raised from, in one line; "" without one.
    """

    type: str
    message: str
    traceback: str
    location: tuple[str, int, str] | None
    wall_time: float
    phases: tuple[Phase, ...] | None = None
    callback: str = ""
    bases: tuple[str, ...] = ()
    own_steps: int = 0
    alarm: Alarm | None = None
    chain: tuple[RaisedError, ...] = ()
    root: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEnd:
    """How a process ended. Exactly one of `exit_code` and `signal` is set."""

    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit(ProcessEnd):
    """How one rank's process exited.

    `order` is the position among this attempt's exits as seen by the supervisor; the first is 0. `completed`
    says that the script ran its last line. `forkserver` says how the process that had started the rank ended,
    if the kernel killed the rank for that.
    """

    rank: int
    pid: int
    order: int
    forkserver: ProcessEnd | None = None
    error: RankError | None = None
    completed: bool = False
