"""One fault to inject: which, into which rank, at which step and in which phase.

The configuration carries injections to every rank, where `trainers.rank.injected` performs them. An injection fires
once in a run, however many attempts the run takes: its canonical text identifies it in the journal. One with `rows` or
`tokens` fires as often as more of them are computed at once. Made by `parsing.py`. Pure; injects nothing itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injections.kinds import KINDS, TOKEN_PHASES, find_kind
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase
from grpo_run.watchdog.rank_names import join_words

MAX_ROWS = 10**6
MAX_TOKENS = 10**9
MAX_STEP = 10**9
MIN_SECONDS, MAX_SECONDS = 0.001, 7 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault with its rank, step and phase. `str()` is its canonical text, which `parse_injection` reads back.

    Step N is the time in which optimizer step N is computed (`global_step + 1 == N`), and the checkpoint and
    the evaluation that follow it. The fault happens when the phase is entered for the first time in that
    step, in the first `train()` call that reaches it. If the step does not enter the phase, the fault does
    not happen.

    Raises:
        ConfigError: there is no such kind, or a number is out of range.
    """

    kind: str
    rank: int
    step: int
    phase: Phase | MemoryPhase
    seconds: float
    """Duration; 0.0 for a kind without a duration, infinity for an unlimited one."""
    rows: int = 0
    """The fault happens whenever more rows are computed at once; 0 for no such limit."""
    tokens: int = 0
    """The fault happens whenever more tokens, padding included, are computed at once; 0 for no such limit."""

    def __post_init__(self) -> None:
        kind = find_kind(self.kind, self.kind)
        where = f"--inject {self.kind}@rank{self.rank}:step{self.step}"
        if self.rank < 0:
            raise ConfigError(f"{where}: ranks count from 0")
        if not 1 <= self.step <= MAX_STEP:
            raise ConfigError(f"{where}: steps count from 1 to {MAX_STEP}")
        if self.phase not in kind.phases.values():
            raise ConfigError(
                f"{where}: {self.kind} happens in phase {join_words(list(kind.phases), last='or')} only"
            )
        if self.rows and (not kind.takes_rows or self.phase is MemoryPhase.optimizer):
            raise ConfigError(f"{where}: {self.kind} takes no rows in phase {self.phase.name}")
        if self.tokens and (not kind.takes_rows or self.phase not in TOKEN_PHASES):
            raise ConfigError(f"{where}: {self.kind} takes no tokens in phase {self.phase.name}")
        if self.tokens and self.rows:
            raise ConfigError(f"{where}: give rows or tokens, not both")
        for name, count, most in (("rows", self.rows, MAX_ROWS), ("tokens", self.tokens, MAX_TOKENS)):
            if not 0 <= count <= most:
                raise ConfigError(f"{where}: {name}={count} is not between 1 and {most}")
        if self.phase is Phase.startup:
            raise ConfigError(f"{where}: no step is computed in phase startup; give another phase")
        if kind.fixed_phase and self.phase is not kind.phase:
            raise ConfigError(f"{where}: {self.kind} happens in phase {kind.phase.name} only")
        if kind.seconds is None and self.seconds != 0.0:
            raise ConfigError(f"{where}: {self.kind} takes no seconds")
        if (
            kind.seconds is not None
            and self.seconds != kind.seconds
            and not (MIN_SECONDS <= self.seconds <= MAX_SECONDS)
        ):
            raise ConfigError(
                f"{where}: seconds={self.seconds:g} is not between {MIN_SECONDS:g} and {MAX_SECONDS:.0f}"
            )

    @classmethod
    def of(
        cls,
        kind: str,
        *,
        rank: int,
        step: int,
        phase: Phase | MemoryPhase | None = None,
        seconds: float | None = None,
        rows: int = 0,
        tokens: int = 0,
    ) -> Injection:
        """Return an injection.

        Phase and duration default to the kind's. Seconds are rounded to milliseconds.
        """
        known = find_kind(kind, kind)
        length = known.seconds or 0.0 if seconds is None else round(seconds, 3)
        return cls(
            kind=kind,
            rank=rank,
            step=step,
            phase=phase or known.phase,
            seconds=length,
            rows=rows,
            tokens=tokens,
        )

    @property
    def place(self) -> tuple[int, Phase | MemoryPhase]:
        """Step and phase."""
        return self.step, self.phase

    @property
    def recurs(self) -> bool:
        """Whether it may fire more than once: as long as too much is computed at once."""
        return self.rows > 0 or self.tokens > 0

    def exceeded_by(self, rows: float, tokens: float) -> bool:
        """Whether so much at once is too much for a fault that recurs."""
        return tokens > self.tokens if self.tokens else rows > self.rows

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        phase = "" if self.phase is kind.phase else f":phase={self.phase.name}"
        number = int(self.seconds) if math.isfinite(self.seconds) and self.seconds % 1 == 0 else self.seconds
        seconds = "" if self.seconds == (kind.seconds or 0.0) else f":seconds={number}"
        rows = f":rows={self.rows}" if self.rows else ""
        tokens = f":tokens={self.tokens}" if self.tokens else ""
        return f"{self.kind}@rank{self.rank}:step{self.step}{phase}{seconds}{rows}{tokens}"
