"""Which injections can happen in a run of a given size, and which are left after some have fired.

Called by the command line, the injector of a rank, and the supervisor when a run ends without its drill. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injections.injection import Injection
from grpo_run.runtime.launch.injections.kinds import KINDS


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
