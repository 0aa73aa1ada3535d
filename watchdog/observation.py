"""What the supervisor can see of a rank: its slot on the board and how it exited.

Plain data, written by `runtime.board.board` (slots) and `runtime.processes.ranks` (exits), read by every detector,
metric and page. Does not interpret what it holds and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Phase(IntEnum):
    """What a rank is doing. Phases nest: a reward runs inside `score`, inside `data`."""

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
    hygiene = 11
    idle = 12


class RankState(IntEnum):
    """How far a rank's script has come."""

    absent = 0  # the slot was never written in this attempt
    starting = 1  # bootstrap runs, no `train()` call yet
    training = 2  # inside a `train()` call
    between = 3  # after a `train()` call, before the script's end
    done = 4  # the script's last line has run: a signal from here on is a warning
    failed = 5  # the script raised


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPhase:
    """A phase that has begun and not ended; `since_seconds` is monotonic time."""

    phase: Phase
    since_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One consistent reading of a rank's slot. All times are monotonic seconds of this machine.

    Steps count optimizer steps of the current `train()` call, as `TrainerState.global_step` does.
    `step` is the last step whose optimizer has run, `voted_step` the last one this rank voted on
    (at `voted_at_seconds`), `committed_step` the last one it knows every rank voted on.
    Gauges that were never set are NaN. `beat_seconds` is when a thread of the interpreter last ran,
    `counted_seconds` when work that can be counted was last done; 0 for never. `notes` is how many
    collectives it has issued from Python.
    """

    rank: int
    local_rank: int
    pid: int
    attempt: int
    state: RankState
    phases: tuple[OpenPhase, ...]
    train_call: int
    step: int
    target_steps: int
    voted_step: int
    voted_at_seconds: float
    committed_step: int
    train_started_seconds: float
    resumed_step: int
    last_progress_seconds: float
    writes: int
    tokens_generated: int
    rewards_scored: int
    votes: int
    vote_wait_seconds: float
    hygiene_runs: int
    hygiene_seconds: float
    checkpoint_step: int
    checkpoint_seconds: float
    reward: float
    completion_length: float
    loss: float
    grad_norm: float
    learning_rate: float
    beat_seconds: float = 0.0
    counted_seconds: float = 0.0
    notes: int = 0

    @property
    def phase(self) -> Phase | None:
        """The innermost open phase, or None before the first."""
        return self.phases[-1].phase if self.phases else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """An exception that left the user's script, as the rank's bootstrap wrote it down.

    `location` is the innermost frame that is not inside an installed library, as (file, line, function).
    """

    type: str
    message: str
    traceback: str
    location: tuple[str, int, str] | None
    wall_time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How one rank's process ended. Exactly one of `exit_code` and `signal` is set.

    `order` is the place among this attempt's exits as the supervisor saw them, first is 0.
    """

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    order: int
    error: RankError | None = None
    completed: bool = field(default=False)
