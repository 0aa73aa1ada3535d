"""What the supervisor tells a rank, and how it travels: one JSON object in one environment variable.

Written by `cli.launch` through the supervisor, read once by the bootstrap. Plain data.
"""

from __future__ import annotations

import json
import os

import pydantic

from grpo_run.runtime.record.failure_rate import PRIOR_FAILURE_SECONDS

VARIABLE = "GRPO_RUN_RANK"


class RankSettings(pydantic.BaseModel):
    """Settings of one rank in one attempt.

    `generation` overrides fields of the script's own GRPO or RLOO configuration; `hygiene_every` is in
    optimizer steps, 0 for never; `resume_from` is a run id or a checkpoint directory. `staging` is where snapshots
    go, None to save directly; one is taken every `snapshot_every` steps, None to choose from the mean time between
    failures, 0 for never.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    run_id: str
    run_directory: str
    target: str
    module: bool
    arguments: tuple[str, ...]
    attempt: int
    first_attempt: bool
    run_started_at: float
    log: str
    stacks: str
    socket: str
    error: str
    preloaded: bool
    parent_pid: int
    title: str
    hygiene_every: int = 0
    generation: dict[str, int | float] = {}
    resume_from: str | None = None
    allow_untested: bool = False
    expected_distributed_type: str | None = None
    vote_timeout_seconds: float = 1800.0
    staging: str | None = None
    snapshot_every: int | None = None
    failure_seconds: float = PRIOR_FAILURE_SECONDS
    injections: tuple[str, ...] = ()
    injections_fired: tuple[str, ...] = ()

    def to_environment(self) -> dict[str, str]:
        """The variable that carries it."""
        # ASCII: arguments that are no UTF-8 hold lone surrogates
        return {VARIABLE: json.dumps(self.model_dump())}

    @classmethod
    def from_environment(cls) -> RankSettings:
        """Read it back; raises pydantic's error when it is not there, which only a bug can cause."""
        return cls.model_validate(json.loads(os.environ[VARIABLE]))
