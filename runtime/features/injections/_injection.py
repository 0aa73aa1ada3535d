"""The text of injections, and which of them can still happen in a run.

`_faults.py` has the kinds, and what one may say of a phase, a length and a size; it is checked here. An
injection fires once in a run, however many attempts the run takes: its canonical text identifies it in
`run.json` and in the journal. One with `rows` or `tokens` fires as often as more of them are computed at
once. Injects nothing.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.injections._faults import KINDS, FaultKind
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import join_words

TOKEN_PHASES = (MemoryPhase.forward, MemoryPhase.backward)
"""Where the number of tokens that are computed at once is known: rows times padded length."""
MAX_ROWS = 10**6
MAX_TOKENS = 10**9
MAX_STEP = 10**9
MIN_SECONDS, MAX_SECONDS = 0.001, 7 * 86_400.0


def help_text() -> str:
    """Return the text of `--inject help`: the grammar, and one line per kind, with its default phase."""
    width = max(map(len, KINDS))
    lines = (f"{name:<{width}}  {kind.sentence} ({kind.phase.name})" for name, kind in KINDS.items())
    return "\n".join(
        [f"{GRAMMAR}, and for oom [:rows=N] or [:tokens=N]; the usual phase is in brackets:", *lines]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault with its rank, step and phase. `str()` is its canonical text.

    Step N is the time in which optimizer step N is computed (`global_step + 1 == N`), and the checkpoint and
    the evaluation that follow it. The fault happens when the phase is entered for the first time in that
    step, in the first `train()` call that reaches it. If the step does not enter the phase, the fault does
    not happen.
    """

    name: str
    rank: int
    step: int
    phase: Phase | MemoryPhase
    seconds: float
    """Duration; 0.0 for a kind without a duration, infinity for an unlimited one."""
    rows: int = 0
    """The fault happens whenever more rows are computed at once; 0 for no such limit."""
    tokens: int = 0
    """The fault happens whenever more tokens, padding included, are computed at once; 0 for no such limit."""

    @property
    def kind(self) -> FaultKind:
        """What happens."""
        return KINDS[self.name]

    @property
    def recurs(self) -> bool:
        """Whether it may fire more than once: as long as too much is computed at once."""
        return self.rows > 0 or self.tokens > 0

    def exceeded_by(self, rows: float, tokens: float) -> bool:
        """Whether so much at once is too much for a fault that recurs."""
        return tokens > self.tokens if self.tokens else rows > self.rows

    def __str__(self) -> str:
        phase = "" if self.phase is self.kind.phase else f":phase={self.phase.name}"
        number = int(self.seconds) if math.isfinite(self.seconds) and self.seconds % 1 == 0 else self.seconds
        seconds = "" if self.seconds == (self.kind.seconds or 0.0) else f":seconds={number}"
        rows = f":rows={self.rows}" if self.rows else ""
        tokens = f":tokens={self.tokens}" if self.tokens else ""
        return f"{self.name}@rank{self.rank}:step{self.step}{phase}{seconds}{rows}{tokens}"


GRAMMAR = "KIND@rankR:stepN[:phase=PHASE][:seconds=S]"
PATTERN = re.compile(
    r"(?P<kind>[\w-]+)@rank(?P<rank>\d{1,7}):step(?P<step>\d{1,10})"
    r"(:phase=(?P<phase>\w+)|:seconds=(?P<seconds>\d{1,9}(\.\d{1,9})?)"
    r"|:rows=(?P<rows>[1-9]\d{0,9})|:tokens=(?P<tokens>[1-9]\d{0,9}))*",
    re.ASCII,
)


def parse_injection(text: str) -> Injection:
    """Parse `KIND@rankR:stepN[:phase=PHASE][:seconds=S]`, or with `[:rows=N]` or `[:tokens=N]` for memory.

    Phase and duration default to the kind's. Seconds are rounded to milliseconds.

    Raises:
        ConfigError: the text is wrong; the message holds it, the reason, and the closest known word.
    """
    name = text.partition("@")[0]
    if name not in KINDS:
        raise ConfigError(f"--inject {text}: no such kind {name!r}; {_nearest(name, KINDS)}")
    kind, found = KINDS[name], PATTERN.fullmatch(text)
    if found is None:
        more = ", with rows=N or tokens=N" if kind.takes_rows else ""
        raise ConfigError(f"--inject {text}: write {GRAMMAR}{more}, for example {name}@rank1:step7")
    given = found.groupdict()
    if given["phase"] is not None and given["phase"] not in kind.phases:
        where = f"{name} does not happen in {given['phase']!r}"
        raise ConfigError(f"--inject {text}: {where}; {_nearest(given['phase'], kind.phases)}")
    made = Injection(
        name=name,
        rank=int(given["rank"]),
        step=int(given["step"]),
        phase=kind.phases[given["phase"]] if given["phase"] else kind.phase,
        seconds=float(given["seconds"]) if given["seconds"] else kind.seconds or 0.0,
        rows=int(given["rows"] or 0),
        tokens=int(given["tokens"] or 0),
    )
    if (reason := _refused(made, timed=given["seconds"] is not None)) is not None:
        raise ConfigError(f"--inject {text}: {reason}")
    return replace(made, seconds=round(made.seconds, 3))


def _refused(one: Injection, *, timed: bool) -> str | None:
    """Return why an injection is not possible; None if it is.

    Args:
        timed: a duration was given.
    """
    kind, phase = one.kind, one.phase
    refused = {
        f"ranks count from 0, steps from 1 to {MAX_STEP}": not 1 <= one.step <= MAX_STEP,
        f"{one.name} happens in phase {kind.phase.name} only": kind.fixed_phase and phase is not kind.phase,
        f"{one.name} takes no rows in phase {phase.name}": (
            one.rows > 0 and (not kind.takes_rows or phase is MemoryPhase.optimizer)
        ),
        f"{one.name} takes no tokens in phase {phase.name}": one.tokens > 0 and phase not in TOKEN_PHASES,
        "give rows or tokens, not both": one.rows > 0 and one.tokens > 0,
        f"rows={one.rows} is not between 1 and {MAX_ROWS}": one.rows > MAX_ROWS,
        f"tokens={one.tokens} is not between 1 and {MAX_TOKENS}": one.tokens > MAX_TOKENS,
        f"{one.name} takes no seconds": timed and kind.seconds is None,
        f"seconds={one.seconds:.9g} is not between {MIN_SECONDS:g} and {MAX_SECONDS:.0f}": (
            timed and not MIN_SECONDS <= one.seconds <= MAX_SECONDS
        ),
    }
    return next((reason for reason, holds in refused.items() if holds), None)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = [name for name in known if word and name.startswith(f"{word}-")]
    near = near or difflib.get_close_matches(word, list(known), 1, cutoff=0.7)
    return f"did you mean {join_words(near, last='or')}?" if near else f"one of {', '.join(known)}"


def parse_all(texts: Iterable[str]) -> tuple[Injection, ...]:
    """Parse the values of all `--inject` options, in order.

    Raises:
        ConfigError: one is wrong or given twice, or two collective ones share a step and a phase.
    """
    found: list[Injection] = []
    for text in texts:
        injection = parse_injection(text)
        if injection in found:
            raise ConfigError(f"--inject {text}: given twice; an injection fires once in a run")
        clash = next((other for other in found if _clash(injection, other)), None)
        if clash is not None:
            raise ConfigError(
                f"--inject {text}: {clash} is a collective at the same step and phase; change the step or"
                " phase of one"
            )
        found.append(injection)
    return tuple(found)


def _clash(left: Injection, right: Injection) -> bool:
    there = (left.step, left.phase) == (right.step, right.phase)
    return there and left.kind.collective and right.kind.collective


def check(injections: Iterable[Injection], world_size: int) -> None:
    """Check that every injection can happen in a run of `world_size` ranks.

    Raises:
        ConfigError: the rank does not exist, or a collective fault needs a second rank.
    """
    for injection in injections:
        if injection.rank >= world_size:
            ranks = "the only rank is 0" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
            raise ConfigError(f"--inject {injection}: there is no rank {injection.rank}; {ranks}")
        if injection.kind.collective and world_size < 2:
            raise ConfigError(f"--inject {injection}: {injection.name} needs at least 2 ranks")


def remaining(injections: Iterable[Injection], fired: Collection[str]) -> tuple[Injection, ...]:
    """Return the injections that have not fired.

    Args:
        injections: of the run.
        fired: canonical texts, from the `injection` field of `fault_injected` events.
    """
    return tuple(injection for injection in injections if str(injection) not in fired)
