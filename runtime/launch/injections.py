"""The faults of `--inject`: their kinds, their text form, and which of them can still happen in a run.

An injected fault names its kind, rank, step and phase. `KINDS` is the table of effects, default phases and
parameters; the constructor of `Injection` checks what one may say, and parsing reports errors in one line.
The configuration carries injections to every rank, where `runtime/rank/injected_faults.py` performs them.
One fires once in a run, however many attempts the run takes: its canonical text identifies it in the
journal. One with `rows` or `tokens` fires as often as more of them are computed at once. `check`,
`remaining` and `armed` say which can happen in a run of a given size and which are left: for the command
line, the ranks, and the supervisor when a run ends without one. Pure; injects nothing.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_run.runtime.errors import ConfigError
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import join_words

MEMORY_PHASES = {
    phase.name: phase
    for phase in (
        MemoryPhase.generate,
        MemoryPhase.score,
        MemoryPhase.forward,
        MemoryPhase.backward,
        MemoryPhase.optimizer,
    )
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
        collective: whether it calls torch.distributed, and therefore needs a second rank.
        common: whether the other ranks take part, each with one all-reduce.
        arms: whether it returns immediately and takes effect later. Such a fault comes first at its place.
    """

    sentence: str
    phase: Phase | MemoryPhase
    seconds: float | None = None
    fixed_phase: bool = False
    collective: bool = False
    common: bool = False
    arms: bool = False

    @property
    def phases(self) -> Mapping[str, Phase | MemoryPhase]:
        """The phases in which it can happen, by name. Memory runs out in parts of a step that the board does not tell apart."""
        return MEMORY_PHASES if isinstance(self.phase, MemoryPhase) else Phase.__members__

    @property
    def takes_rows(self) -> bool:
        """Whether it may depend on how many rows are computed at once."""
        return isinstance(self.phase, MemoryPhase)


KINDS: dict[str, FaultKind] = {
    "kill": FaultKind(sentence="the rank sends itself SIGKILL", phase=Phase.forward_backward),
    "exception": FaultKind(sentence="the rank raises InjectedFault", phase=Phase.forward_backward),
    "hang": FaultKind(
        sentence="the rank sleeps, without end or for `seconds`", phase=Phase.reward, seconds=math.inf
    ),
    "stop": FaultKind(sentence="the rank sends itself SIGSTOP", phase=Phase.reward),
    "gil": FaultKind(sentence="a regular expression that never returns holds the GIL", phase=Phase.reward),
    "lock": FaultKind(
        sentence="the rank waits for a lock, without end or for `seconds`",
        phase=Phase.reward,
        seconds=math.inf,
    ),
    "mismatch-operation": FaultKind(
        sentence="the rank calls all_gather where the others call all_reduce",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "mismatch-shape": FaultKind(
        sentence="the rank calls all_reduce with a tensor of another size than the others",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "mismatch-group": FaultKind(
        sentence="the rank calls all_reduce on another process group than the others",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "skip": FaultKind(
        sentence="the rank skips an all_reduce that the others call",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "extra": FaultKind(
        sentence="the rank alone calls an all_reduce", phase=Phase.forward_backward, collective=True
    ),
    "exit": FaultKind(sentence="the rank calls sys.exit(0) during training", phase=Phase.forward_backward),
    "return": FaultKind(
        sentence="the rank alone returns from train(), or leaves its loop, at the end of the step",
        phase=Phase.forward_backward,
        arms=True,
    ),
    "slow": FaultKind(
        sentence="the rank sleeps for `seconds` once, then continues; default 1",
        phase=Phase.reward,
        seconds=1.0,
    ),
    "slow-generation": FaultKind(
        sentence="every forward pass of the step's generation takes `seconds` longer; default 0.2",
        phase=Phase.generate,
        seconds=0.2,
        fixed_phase=True,
        arms=True,
    ),
    "data": FaultKind(
        sentence="the rank sleeps while it loads data, without end or for `seconds`",
        phase=Phase.data,
        seconds=math.inf,
    ),
    "checkpoint": FaultKind(
        sentence="the rank sleeps while it writes a checkpoint, without end or for `seconds`",
        phase=Phase.checkpoint,
        seconds=math.inf,
    ),
    "exit-hang": FaultKind(
        sentence="an exit handler sleeps after the script, without end or for `seconds`",
        phase=Phase.data,
        seconds=math.inf,
        arms=True,
    ),
    "oom": FaultKind(
        sentence="the rank raises torch.OutOfMemoryError in generate, score, forward, backward or optimizer; with `rows=N`"
        " whenever it computes more than N rows at once, from that step on; with `tokens=N` in forward or backward, more than"
        " N rows times their padded length",
        phase=MemoryPhase.forward,
    ),
    "oom-nccl": FaultKind(
        sentence="the same as NCCL reports it, instead of a collective", phase=MemoryPhase.backward
    ),
    "ignore-term": FaultKind(
        sentence="the rank ignores SIGTERM from then on; use it with a hang", phase=Phase.data, arms=True
    ),
}
"""All kinds, in the order of `--inject help`."""


def find_kind(name: str, text: str) -> FaultKind:
    """Return the kind of this name.

    Args:
        name: as the user has written it.
        text: of the whole injection, for the message.

    Raises:
        ConfigError: there is no such kind; the message holds the closest known word.
    """
    if name in KINDS:
        return KINDS[name]
    family = [kind for kind in KINDS if name and kind.startswith(f"{name}-")]
    near = family or difflib.get_close_matches(name, KINDS, 1)
    hint = f"did you mean {join_words(near, last='or')}?" if near else "`--inject help` lists the kinds"
    raise ConfigError(f"--inject {text}: no such kind {name!r}; {hint}")


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


GRAMMAR = "KIND@rankR:stepN[:phase=PHASE][:seconds=S]"


def parse_injection(text: str) -> Injection:
    """Parse `KIND@rankR:stepN[:phase=PHASE][:seconds=S]`, or with `[:rows=N]` or `[:tokens=N]` for memory.

    Raises:
        ConfigError: the text is wrong; the message holds it, the reason, and the closest known word.
    """
    kind, at, address = text.partition("@")
    known = find_kind(kind, text)
    words = address.split(":")
    if not at or len(words) < 2:
        raise ConfigError(f"--inject {text}: write {GRAMMAR}, for example {kind}@rank1:step7")
    rank, step = _number(words[0], "rank", text), _number(words[1], "step", text)
    given: dict[str, str] = {}
    for word in words[2:]:
        key, _, value = word.partition("=")
        if key in given:
            raise ConfigError(f"--inject {text}: {key} is given twice")
        if key not in ("phase", "seconds") and not (key in ("rows", "tokens") and known.takes_rows):
            last = ", seconds=S, rows=N nor tokens=N" if known.takes_rows else " nor seconds=S"
            raise ConfigError(f"--inject {text}: {word!r} is neither phase=PHASE{last}")
        given[key] = value
    phase = _phase(given["phase"], known, text) if "phase" in given else None
    seconds = _seconds(given["seconds"], text) if "seconds" in given else None
    rows, tokens = (_count(given[name], name, text) if name in given else 0 for name in ("rows", "tokens"))
    return Injection.of(kind, rank=rank, step=step, phase=phase, seconds=seconds, rows=rows, tokens=tokens)


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
                f"--inject {text}: {clash} is a collective at the same step and phase; change the step or phase of one"
            )
        found.append(injection)
    return tuple(found)


def _clash(left: Injection, right: Injection) -> bool:
    return left.place == right.place and KINDS[left.kind].collective and KINDS[right.kind].collective


def _number(word: str, name: str, text: str) -> int:
    found = re.fullmatch(f"{name}([0-9]{{1,10}})", word)
    if found is None:
        raise ConfigError(f"--inject {text}: {word!r} is not {name} and a number; write {GRAMMAR}")
    return int(found[1])


def _phase(name: str, kind: FaultKind, text: str) -> Phase | MemoryPhase:
    if name in kind.phases:
        return kind.phases[name]
    near = difflib.get_close_matches(name, kind.phases, 1)
    hint = f"did you mean {near[0]}?" if near else f"phases: {', '.join(kind.phases)}"
    raise ConfigError(f"--inject {text}: no such phase {name!r}; {hint}")


def _seconds(value: str, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) is None:
        raise ConfigError(f"--inject {text}: seconds={value} is not a number of seconds such as 2.5")
    return float(value)


def _count(value: str, name: str, text: str) -> int:
    if re.fullmatch(r"[1-9][0-9]{0,9}", value) is None:
        raise ConfigError(f"--inject {text}: {name}={value} is not a number of {name} such as 2")
    return int(value)


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
    """Return the injections that can fire in the next attempt: those that have not fired, and those that recur."""
    return tuple(one for one in injections if one.recurs or str(one) not in fired)
