"""The injected faults of `--inject`: their kinds, their text, and which of them can still happen in a run.

`KINDS` is the table of effects, default phases and parameters; the constructor of `Injection` checks what one
may say. The configuration carries injections to every rank, where `runtime/features/injections/` performs
them. One fires once in a run, however many attempts the run takes: its canonical text identifies it in the
journal. One with `rows` or `tokens` fires as often as more of them are computed at once. `check`, `remaining`
and `armed` say which can happen in a run of a given size and which are left: for the command line, the ranks,
and the supervisor when a run ends without one. Pure; injects nothing.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import join_words

MEMORY_PHASES = {
    name: MemoryPhase[name] for name in ("generate", "score", "forward", "backward", "optimizer")
}
"""Where memory can run out, by name."""
TOKEN_PHASES = (MemoryPhase.forward, MemoryPhase.backward)
"""Where the number of tokens that are computed at once is known: rows times padded length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """Description of one kind of fault.

    Args:
        sentence: what happens, for `--inject help`.
        phase: where it happens by default.
        seconds: default duration; infinity for an unlimited one, None for a kind without a duration.
        fixed_phase: whether any other phase is refused.
        collective: whether it calls torch.distributed, while each other rank makes one all-reduce; it needs a
            second rank.
        arms: whether it returns immediately and takes effect later. Such a fault comes first at its place.
    """

    sentence: str
    phase: Phase | MemoryPhase
    seconds: float | None = None
    fixed_phase: bool = False
    collective: bool = False
    arms: bool = False

    @property
    def phases(self) -> Mapping[str, Phase | MemoryPhase]:
        """The phases in which it can happen, by name. Memory runs out in parts of a step that are one on the
        board."""
        return MEMORY_PHASES if isinstance(self.phase, MemoryPhase) else Phase.__members__

    @property
    def takes_rows(self) -> bool:
        """Whether it may depend on how many rows are computed at once."""
        return isinstance(self.phase, MemoryPhase)


def _kind(sentence: str, phase: Phase | MemoryPhase, **features: Any) -> FaultKind:
    return FaultKind(sentence=sentence, phase=phase, **features)


_BODY, _REWARD, _DATA = Phase.forward_backward, Phase.reward, Phase.data
KINDS: dict[str, FaultKind] = {
    "kill": _kind("the rank sends itself SIGKILL", _BODY),
    "exception": _kind("the rank raises InjectedFault", _BODY),
    "hang": _kind("the rank sleeps, without end or for `seconds`", _REWARD, seconds=math.inf),
    "stop": _kind("the rank sends itself SIGSTOP", _REWARD),
    "gil": _kind("a regular expression that never returns holds the GIL", _REWARD),
    "lock": _kind("the rank waits for a lock, without end or for `seconds`", _REWARD, seconds=math.inf),
    "mismatch-operation": _kind(
        "the rank calls all_gather where the others call all_reduce", _BODY, collective=True
    ),
    "mismatch-shape": _kind(
        "the rank calls all_reduce with a tensor of another size than the others",
        _BODY, collective=True,
    ),
    "mismatch-group": _kind(
        "the rank calls all_reduce on another process group than the others",
        _BODY, collective=True,
    ),
    "skip": _kind("the rank skips an all_reduce that the others call", _BODY, collective=True),
    "exit": _kind("the rank calls sys.exit(0) during training", _BODY),
    "return": _kind(
        "the rank alone returns from train(), or leaves its loop, at the end of the step", _BODY, arms=True
    ),
    "slow": _kind("the rank sleeps for `seconds` once, then continues; default 1", _REWARD, seconds=1.0),
    "slow-generation": _kind(
        "every forward pass of the step's generation takes `seconds` longer; default 0.2",
        Phase.generate, seconds=0.2, fixed_phase=True, arms=True,
    ),
    "exit-hang": _kind(
        "an exit handler sleeps after the script, without end or for `seconds`",
        _DATA, seconds=math.inf, arms=True,
    ),
    "oom": _kind(
        "the rank raises torch.OutOfMemoryError in generate, score, forward, backward or optimizer; with"
        " `rows=N` whenever it computes more than N rows at once, from that step on; with `tokens=N` in"
        " forward or backward, more than N rows times their padded length",
        MemoryPhase.forward,
    ),
    "oom-nccl": _kind("the same as NCCL reports it, instead of a collective", MemoryPhase.backward),
}  # fmt: skip
"""All kinds, in the order of `--inject help`."""


def help_text() -> str:
    """Return the text of `--inject help`: one line per kind, with its default phase."""
    width = max(map(len, KINDS))
    return "\n".join(f"{name:<{width}}  {kind.sentence} ({kind.phase.name})" for name, kind in KINDS.items())


MAX_ROWS = 10**6
MAX_TOKENS = 10**9
MAX_STEP = 10**9
MIN_SECONDS, MAX_SECONDS = 0.001, 7 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault with its rank, step and phase. `str()` is its canonical text, which `parse_injection` reads
    back.

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
        kind = KINDS[self.kind]
        where = f"--inject {self.kind}@rank{self.rank}:step{self.step}"
        only = kind.fixed_phase and self.phase is not kind.phase
        timed = kind.seconds is not None
        refused = {
            f"ranks count from 0, steps from 1 to {MAX_STEP}": self.rank < 0
            or not 1 <= self.step <= MAX_STEP,
            f"{self.kind} happens in phase {kind.phase.name} only": only,
            f"{self.kind} happens in phase {join_words(list(kind.phases), last='or')} only": (
                self.phase not in kind.phases.values() or self.phase is Phase.startup
            ),
            f"{self.kind} takes no rows in phase {self.phase.name}": (
                self.rows != 0 and (not kind.takes_rows or self.phase is MemoryPhase.optimizer)
            ),
            f"{self.kind} takes no tokens in phase {self.phase.name}": (
                self.tokens != 0 and (not kind.takes_rows or self.phase not in TOKEN_PHASES)
            ),
            "give rows or tokens, not both": self.rows != 0 and self.tokens != 0,
            f"rows={self.rows} is not between 1 and {MAX_ROWS}": not 0 <= self.rows <= MAX_ROWS,
            f"tokens={self.tokens} is not between 1 and {MAX_TOKENS}": not 0 <= self.tokens <= MAX_TOKENS,
            f"{self.kind} takes no seconds": not timed and self.seconds != 0.0,
            f"seconds={self.seconds:g} is not between {MIN_SECONDS:g} and {MAX_SECONDS:.0f}": (
                timed and self.seconds != kind.seconds and not MIN_SECONDS <= self.seconds <= MAX_SECONDS
            ),
        }
        for reason, holds in refused.items():
            if holds:
                raise ConfigError(f"{where}: {reason}")

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
        known = KINDS[kind]
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


GRAMMAR = "KIND@rankR:stepN[:phase=PHASE][:seconds=S]"
PATTERN = re.compile(
    r"(?P<kind>[\w-]+)@rank(?P<rank>\d{1,7}):step(?P<step>\d{1,10})"
    r"(:phase=(?P<phase>\w+)|:seconds=(?P<seconds>\d{1,9}(\.\d{1,9})?)"
    r"|:rows=(?P<rows>[1-9]\d{0,9})|:tokens=(?P<tokens>[1-9]\d{0,9}))*",
    re.ASCII,
)


def parse_injection(text: str) -> Injection:
    """Parse `KIND@rankR:stepN[:phase=PHASE][:seconds=S]`, or with `[:rows=N]` or `[:tokens=N]` for memory.

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
        raise ConfigError(
            f"--inject {text}: no such phase {given['phase']!r}; {_nearest(given['phase'], kind.phases)}"
        )
    return Injection.of(
        name,
        rank=int(given["rank"]),
        step=int(given["step"]),
        phase=kind.phases[given["phase"]] if given["phase"] else None,
        seconds=float(given["seconds"]) if given["seconds"] else None,
        rows=int(given["rows"] or 0),
        tokens=int(given["tokens"] or 0),
    )


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
    return left.place == right.place and KINDS[left.kind].collective and KINDS[right.kind].collective


def check(injections: Iterable[Injection], world_size: int) -> None:
    """Check that every injection can happen in a run of `world_size` ranks.

    Raises:
        ConfigError: the rank does not exist, or a collective fault needs a second rank.
    """
    for injection in injections:
        if injection.rank >= world_size:
            ranks = "the only rank is 0" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
            raise ConfigError(f"--inject {injection}: there is no rank {injection.rank}; {ranks}")
        if KINDS[injection.kind].collective and world_size < 2:
            raise ConfigError(f"--inject {injection}: {injection.kind} needs at least 2 ranks")


def remaining(injections: Sequence[Injection], fired: Collection[str]) -> tuple[Injection, ...]:
    """Return the injections that have not fired.

    Args:
        injections: of the run.
        fired: canonical texts, from the `injection` field of `fault_injected` events.
    """
    return tuple(injection for injection in injections if str(injection) not in fired)


def armed(injections: Sequence[Injection], fired: Collection[str]) -> tuple[Injection, ...]:
    """Return the injections that can fire in the next attempt: those that have not fired, and those that
    recur."""
    return tuple(one for one in injections if one.recurs or str(one) not in fired)
