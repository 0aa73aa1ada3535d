"""What fault to do to which rank, at which step and in which phase: the text of `--inject`, checked.

Written on the command line or by a test, carried to every rank, done there by `trainers.rank.faults`. An injection
fires once in a run, however many attempts the run takes: its canonical text is its name in the journal.
Pure; hurts nothing itself.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from grpo_run.runtime.errors import ConfigError
from grpo_run.watchdog.observation import Phase

GRAMMAR = "KIND@rankR:stepN[:phase=PHASE][:seconds=S]"
MAX_STEP = 10**9
MIN_SECONDS, MAX_SECONDS = 0.001, 7 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What one kind of fault is.

    `phase` is where it happens when the user does not say. `seconds` is how long it lasts when the user does not
    say (infinity: for ever); None for a kind that has no length. `fixed_phase` refuses any other phase.
    `collective` kinds go through torch.distributed, so they need a second rank. `common` is whether the other ranks
    take part, each with one all-reduce. `arms` is whether it returns at once and takes effect later, so that it
    comes before what else happens at the same place.
    """

    sentence: str
    phase: Phase
    seconds: float | None = None
    fixed_phase: bool = False
    collective: bool = False
    common: bool = False
    arms: bool = False


KINDS: dict[str, Kind] = {
    "kill": Kind(sentence="the rank sends itself SIGKILL", phase=Phase.forward_backward),
    "exception": Kind(sentence="the rank raises InjectedFault", phase=Phase.forward_backward),
    "hang": Kind(sentence="the rank sleeps, for ever or `seconds`", phase=Phase.reward, seconds=math.inf),
    "stop": Kind(sentence="the rank sends itself SIGSTOP", phase=Phase.reward),
    "gil": Kind(
        sentence="a regular expression that never ends holds the interpreter's lock", phase=Phase.reward
    ),
    "lock": Kind(
        sentence="the rank waits for a lock that nobody frees, for ever or `seconds`",
        phase=Phase.reward,
        seconds=math.inf,
    ),
    "mismatch-operation": Kind(
        sentence="the rank calls all_gather where the others call all_reduce",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "mismatch-shape": Kind(
        sentence="the rank calls all_reduce with a tensor of another size than the others",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "mismatch-group": Kind(
        sentence="the rank calls all_reduce on another process group than the others",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "skip": Kind(
        sentence="the rank leaves out an all_reduce that the others call",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "extra": Kind(
        sentence="the rank alone calls an all_reduce", phase=Phase.forward_backward, collective=True
    ),
    "exit": Kind(
        sentence="the rank leaves the script with sys.exit(0) in the middle of training",
        phase=Phase.forward_backward,
    ),
    "return": Kind(
        sentence="the rank alone returns from train() at the end of the step",
        phase=Phase.forward_backward,
        arms=True,
    ),
    "slow": Kind(
        sentence="the rank sleeps `seconds` once, then goes on; default 1", phase=Phase.reward, seconds=1.0
    ),
    "slow-generation": Kind(
        sentence="every forward pass of the step's generation takes `seconds` longer; default 0.2",
        phase=Phase.generate,
        seconds=0.2,
        fixed_phase=True,
        arms=True,
    ),
    "data": Kind(
        sentence="the rank sleeps while it loads data, for ever or `seconds`",
        phase=Phase.data,
        seconds=math.inf,
    ),
    "checkpoint": Kind(
        sentence="the rank sleeps while it writes the step's checkpoint, for ever or `seconds`",
        phase=Phase.checkpoint,
        seconds=math.inf,
    ),
    "exit-hang": Kind(
        sentence="an exit handler sleeps after the script's last line, for ever or `seconds`",
        phase=Phase.data,
        seconds=math.inf,
        arms=True,
    ),
    "ignore-term": Kind(
        sentence="the rank ignores SIGTERM from there on; meant to go with a hang",
        phase=Phase.data,
        arms=True,
    ),
}
"""Every kind, in the order of `--inject help`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault with its address. `str()` is its canonical text, which names it; `parse` reads that back.

    Step N lasts while optimizer step N is worked on (`global_step + 1 == N`), and the checkpoint and the evaluation
    that follow it. Of several times that the phase is entered in it, the first counts; a step that does not enter it
    is passed over. Of several `train()` calls the first to come there counts.

    Raises:
        ConfigError: no such kind, or a number out of range.
    """

    kind: str
    rank: int
    step: int
    phase: Phase
    seconds: float
    """0.0 for a kind that has no length, infinity for ever."""

    def __post_init__(self) -> None:
        kind = _kind(self.kind, self.kind)
        where = f"--inject {self.kind}@rank{self.rank}:step{self.step}"
        if self.rank < 0:
            raise ConfigError(f"{where}: ranks count from 0")
        if not 1 <= self.step <= MAX_STEP:
            raise ConfigError(f"{where}: steps count from 1 to {MAX_STEP}")
        if self.phase is Phase.startup:
            raise ConfigError(f"{where}: no step is under way in phase startup; name another")
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
        cls, kind: str, *, rank: int, step: int, phase: Phase | None = None, seconds: float | None = None
    ) -> Injection:
        """An injection with the kind's own phase and length where they are not given; seconds to the millisecond."""
        known = _kind(kind, kind)
        length = known.seconds or 0.0 if seconds is None else round(seconds, 3)
        return cls(kind=kind, rank=rank, step=step, phase=phase or known.phase, seconds=length)

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Read `KIND@rankR:stepN[:phase=PHASE][:seconds=S]`.

        Raises:
            ConfigError: with the text, what is wrong with it and what is close.
        """
        kind, at, address = text.partition("@")
        _kind(kind, text)
        words = address.split(":")
        if not at or len(words) < 2:
            raise ConfigError(f"--inject {text}: write {GRAMMAR}, as {kind}@rank1:step7")
        rank, step = _number(words[0], "rank", text), _number(words[1], "step", text)
        phase: Phase | None = None
        seconds: float | None = None
        for word in words[2:]:
            key, _, value = word.partition("=")
            if key == "phase" and phase is None:
                phase = _phase(value, text)
            elif key == "seconds" and seconds is None:
                seconds = _seconds(value, text)
            elif key in ("phase", "seconds"):
                raise ConfigError(f"--inject {text}: {key} is given twice")
            else:
                raise ConfigError(f"--inject {text}: {word!r} is neither phase=PHASE nor seconds=S")
        return cls.of(kind, rank=rank, step=step, phase=phase, seconds=seconds)

    @property
    def place(self) -> tuple[int, Phase]:
        """Step and phase."""
        return self.step, self.phase

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        phase = "" if self.phase is kind.phase else f":phase={self.phase.name}"
        number = int(self.seconds) if math.isfinite(self.seconds) and self.seconds % 1 == 0 else self.seconds
        seconds = "" if self.seconds == (kind.seconds or 0.0) else f":seconds={number}"
        return f"{self.kind}@rank{self.rank}:step{self.step}{phase}{seconds}"


def _kind(name: str, text: str) -> Kind:
    if name in KINDS:
        return KINDS[name]
    near = difflib.get_close_matches(name, KINDS, 1)
    hint = f"did you mean {near[0]}?" if near else "`--inject help` lists them"
    raise ConfigError(f"--inject {text}: no such kind {name!r}; {hint}")


def _number(word: str, name: str, text: str) -> int:
    found = re.fullmatch(f"{name}([0-9]{{1,10}})", word)
    if found is None:
        raise ConfigError(f"--inject {text}: {word!r} is not {name} and a number; write {GRAMMAR}")
    return int(found[1])


def _phase(name: str, text: str) -> Phase:
    if name in Phase.__members__:
        return Phase[name]
    near = difflib.get_close_matches(name, Phase.__members__, 1)
    hint = f"did you mean {near[0]}?" if near else f"phases: {', '.join(Phase.__members__)}"
    raise ConfigError(f"--inject {text}: no such phase {name!r}; {hint}")


def _seconds(value: str, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) is None:
        raise ConfigError(f"--inject {text}: seconds={value} is not a number of seconds, as 2.5")
    return float(value)


def parse_all(texts: Iterable[str]) -> tuple[Injection, ...]:
    """Read the values of every `--inject` flag, in order.

    Raises:
        ConfigError: one is wrong, one is there twice, or two collective ones share a step and a phase.
    """
    found: list[Injection] = []
    for text in texts:
        injection = Injection.parse(text)
        if injection in found:
            raise ConfigError(f"--inject {text}: given twice, and an injection fires once in a run")
        clash = next((other for other in found if _clash(injection, other)), None)
        if clash is not None:
            raise ConfigError(
                f"--inject {text}: {clash} is a collective at the same step and phase; move one of them"
            )
        found.append(injection)
    return tuple(found)


def _clash(left: Injection, right: Injection) -> bool:
    return left.place == right.place and KINDS[left.kind].collective and KINDS[right.kind].collective


def check(injections: Iterable[Injection], world_size: int) -> None:
    """See that every injection can happen in a run of `world_size` ranks.

    Raises:
        ConfigError: a rank that does not exist, or a collective among one rank.
    """
    for injection in injections:
        if injection.rank >= world_size:
            ranks = "the only rank is 0" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
            raise ConfigError(f"--inject {injection}: there is no rank {injection.rank}; {ranks}")
        if KINDS[injection.kind].collective and world_size < 2:
            raise ConfigError(f"--inject {injection}: {injection.kind} needs at least 2 ranks")


def remaining(injections: Sequence[Injection], fired: Collection[str]) -> tuple[Injection, ...]:
    """Those whose canonical text is not among `fired` (the `injection` fields of `fault_injected` events)."""
    return tuple(injection for injection in injections if str(injection) not in fired)


def help_text() -> str:
    """What `--inject help` prints: a kind and its sentence a line."""
    width = max(map(len, KINDS))
    return "\n".join(f"{name:<{width}}  {kind.sentence} ({kind.phase.name})" for name, kind in KINDS.items())
