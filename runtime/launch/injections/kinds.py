"""Kinds of injected faults: their effect, their default phase, and their parameters.

One table, read by `parsing.py`, `injection.py` and the injector of a rank, which performs them
(`trainers/rank/injected/faults.py`). Pure.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.runtime.errors import ConfigError
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase
from grpo_run.watchdog.rank_names import join_words

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
class Kind:
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


KINDS: dict[str, Kind] = {
    "kill": Kind(sentence="the rank sends itself SIGKILL", phase=Phase.forward_backward),
    "exception": Kind(sentence="the rank raises InjectedFault", phase=Phase.forward_backward),
    "hang": Kind(
        sentence="the rank sleeps, without end or for `seconds`", phase=Phase.reward, seconds=math.inf
    ),
    "stop": Kind(sentence="the rank sends itself SIGSTOP", phase=Phase.reward),
    "gil": Kind(sentence="a regular expression that never returns holds the GIL", phase=Phase.reward),
    "lock": Kind(
        sentence="the rank waits for a lock, without end or for `seconds`",
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
        sentence="the rank skips an all_reduce that the others call",
        phase=Phase.forward_backward,
        collective=True,
        common=True,
    ),
    "extra": Kind(
        sentence="the rank alone calls an all_reduce", phase=Phase.forward_backward, collective=True
    ),
    "exit": Kind(sentence="the rank calls sys.exit(0) during training", phase=Phase.forward_backward),
    "return": Kind(
        sentence="the rank alone returns from train(), or leaves its loop, at the end of the step",
        phase=Phase.forward_backward,
        arms=True,
    ),
    "slow": Kind(
        sentence="the rank sleeps for `seconds` once, then continues; default 1",
        phase=Phase.reward,
        seconds=1.0,
    ),
    "slow-generation": Kind(
        sentence="every forward pass of the step's generation takes `seconds` longer; default 0.2",
        phase=Phase.generate,
        seconds=0.2,
        fixed_phase=True,
        arms=True,
    ),
    "data": Kind(
        sentence="the rank sleeps while it loads data, without end or for `seconds`",
        phase=Phase.data,
        seconds=math.inf,
    ),
    "checkpoint": Kind(
        sentence="the rank sleeps while it writes a checkpoint, without end or for `seconds`",
        phase=Phase.checkpoint,
        seconds=math.inf,
    ),
    "exit-hang": Kind(
        sentence="an exit handler sleeps after the script, without end or for `seconds`",
        phase=Phase.data,
        seconds=math.inf,
        arms=True,
    ),
    "oom": Kind(
        sentence="the rank raises torch.OutOfMemoryError in generate, score, forward, backward or optimizer; with `rows=N`"
        " whenever it computes more than N rows at once, from that step on; with `tokens=N` in forward or backward, more than"
        " N rows times their padded length",
        phase=MemoryPhase.forward,
    ),
    "oom-nccl": Kind(
        sentence="the same as NCCL reports it, instead of a collective", phase=MemoryPhase.backward
    ),
    "ignore-term": Kind(
        sentence="the rank ignores SIGTERM from then on; use it with a hang", phase=Phase.data, arms=True
    ),
}
"""All kinds, in the order of `--inject help`."""


def find_kind(name: str, text: str) -> Kind:
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
