"""Settings of one rank in one attempt, and their encoding: one JSON object in one environment variable.

`runtime.launching` writes the variable for each rank; the bootstrap reads it once. The run's configuration
travels as a whole; the other fields differ by attempt or by rank. Plain data.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pydantic

from grpo_run.runtime.history.progress import PRIOR_FAILURE_SECONDS
from grpo_run.runtime.history.train_calls import KnownCall
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.snapshots.slot import SnapshotName

VARIABLE = "GRPO_RUN_RANK"


class RankSettings(pydantic.BaseModel):
    """Settings of one rank in one attempt."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    config: RunConfig
    """Configuration of the run, without its environment: the rank's own environment already holds that."""
    attempt: int
    """Number of the attempt, from 0."""
    run_started_at: float
    """Wall-clock time of the run's first event, in seconds since the epoch."""
    log: str
    """File that receives the rank's output."""
    errors: str | None = None
    """File that receives its standard error; None for the same file."""
    stacks: str
    """File that receives the rank's stacks."""
    socket: str
    """Unix socket of the rank's worker server."""
    error: str
    """File that receives the exception that ends the rank."""
    preloaded: bool
    """Whether this process was forked from the warm interpreter."""
    fresh_because: str = ""
    """Why this process, which was forked, is a fresh interpreter now; part of a sentence."""
    parent_pid: int
    title: str
    """Process title, as `ps` shows it."""
    failure_seconds: float = PRIOR_FAILURE_SECONDS
    """Mean time between failures, in seconds."""
    known_calls: tuple[KnownCall, ...] = ()
    """The run's `train()` calls of earlier attempts, oldest first."""
    attempt_started_at: float = 0.0
    """Wall-clock time at which the attempt was prepared, in seconds since the epoch."""
    expected_snapshot: SnapshotName | None = None
    """The snapshot in memory that the ranks of one host load; None to load from disk, or nothing."""
    loads_from_disk: bool = False
    """Whether the newest snapshot has been written to disk because ranks could not load it from memory."""
    discarded: tuple[int, int] | None = None
    """The call, and the step from which on the run goes back; None if it does not."""
    features: dict[str, dict[str, Any]] = {}
    """What features have for the rank, by their names."""
    full_world_size: int = 0
    """Ranks of all hosts that the run may have; 0 if their number is fixed."""
    cpus: tuple[int, ...] = ()
    """CPUs that the rank may use; empty for those that it inherits."""

    @property
    def first_attempt(self) -> bool:
        """Whether no attempt of this run came before."""
        return self.attempt == 0

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that carries the settings."""
        # ASCII, because arguments that are not valid UTF-8 hold lone surrogates
        return {VARIABLE: json.dumps(self.model_dump())}

    @classmethod
    def from_environment(cls) -> RankSettings:
        """Decode the settings of this process.

        Raises:
            KeyError: the variable is not set: this process is not a rank.
            pydantic.ValidationError: the value was written by another version.
        """
        return cls.model_validate(json.loads(os.environ[VARIABLE]))
