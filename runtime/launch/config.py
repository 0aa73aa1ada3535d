"""What a run was asked to be: one frozen object, built by `cli.launch`, read by the supervisor.

Defaults live here and nowhere else. Cross-checked when built; does not parse command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injection import Injection
from grpo_run.runtime.supervision.policy import Budget
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds. Each names what happens when it passes."""

    vote_seconds: float = 1800.0
    """A vote that takes longer raises in the ranks that wait."""
    stop_seconds: float = 300.0
    """After a stop was asked for: ranks that have not agreed, saved and left are ended; the last checkpoint counts."""
    term_seconds: float = 1.0
    """Between SIGTERM and SIGKILL, when ranks are ended after a fault."""

    def __post_init__(self) -> None:
        for name in ("vote_seconds", "stop_seconds", "term_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. `target` is a script's path or, with `module`, a module's name; `command` identifies the run."""

    run_id: str
    run_directory: Path
    target: str
    module: bool
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, str]
    preload: bool = True
    budget: Budget = field(default_factory=Budget)
    timeouts: Timeouts = field(default_factory=Timeouts)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)
    injections: tuple[Injection, ...] = ()
    hygiene_every: int = 100
    snapshot_every: int | None = None
    """Steps between snapshots in memory; None to choose, 0 for none."""
    snapshot_directory: Path | None = None
    generation: dict[str, int | float] = field(default_factory=dict)
    resume_from: str | None = None
    allow_untested: bool = False
    expected_distributed_type: str | None = None
    shown_ranks: frozenset[int] = frozenset({0})

    def __post_init__(self) -> None:
        if self.hygiene_every < 0:
            raise ConfigError(f"--hygiene-every must be 0 (never) or more, not {self.hygiene_every}")
        if self.snapshot_every is not None and self.snapshot_every < 0:
            raise ConfigError(
                f"--snapshot-every must be 0 (never), 1 or more, or auto, not {self.snapshot_every}"
            )
        try:
            # a watchdog faster than a timeout it watches would kill what was about to say why it failed
            self.deadlines.check_against({"the vote's timeout": self.timeouts.vote_seconds})
        except ValueError as error:
            raise ConfigError(f"--deadline-ceiling: {error}") from None

    def as_json(self) -> dict[str, Any]:
        """What `run.json` records; the environment stays out of it, it may hold secrets."""
        return {
            "run_id": self.run_id,
            "target": self.target,
            "module": self.module,
            "arguments": list(self.arguments),
            "command": list(self.command),
            "preload": self.preload,
            "hygiene_every": self.hygiene_every,
            "snapshot_every": self.snapshot_every,
            "generation": self.generation,
            "resume_from": self.resume_from,
            "expected_distributed_type": self.expected_distributed_type,
        }
