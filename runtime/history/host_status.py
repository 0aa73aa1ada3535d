"""The hosts of a run, as each of them shows the others: name, state, ranks, and when it was heard last.

The supervisor writes what it has heard to a file of its run directory once a second, and only in a run over
several hosts; `grpo-run status`, the live page and the report read it. Decides nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.files import write_json
from grpo_run.watchdog.json_values import from_json, to_json
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.text import duration_text, rank_names

HEARD_SECONDS = 2.0
"""A host that was heard so recently is heard."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank is; `phase` is its state outside phases, and `step` None if it could not be read."""

    rank: int
    step: int | None = None
    phase: str = ""


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """One host.

    Attributes:
        name: how it calls itself.
        state: of the run, as its supervisor has told; empty if it never has.
        ranks: that it has.
        silent_seconds: for how long it was not heard; None for the host itself.
        outside: why it does not take part, as a clause; empty if it does.
    """

    name: str
    state: str = ""
    ranks: tuple[RankPlace, ...] = ()
    silent_seconds: float | None = None
    outside: str = ""

    @property
    def line(self) -> str:
        """What is shown of it."""
        if self.outside:
            return f"host {self.name} {self.outside}"
        texts = [rank_names([one.rank for one in self.ranks])] if self.ranks else []
        texts += [self.state or "nothing told yet"]
        steps = {one.step for one in self.ranks if one.step is not None}
        if steps:
            texts.append(f"step {min(steps)}" + (f" to {max(steps)}" if len(steps) > 1 else ""))
        phases = sorted({one.phase for one in self.ranks if one.phase})
        texts += ["/".join(phases)] if phases else []
        if self.silent_seconds is None:
            texts.append("this host")
        elif self.silent_seconds > HEARD_SECONDS:
            texts.append(f"not heard for {duration_text(self.silent_seconds)}")
        else:
            texts.append("heard")
        return f"host {self.name}: {', '.join(texts)}"


def own_status(name: str, state: str, slots: Iterable[tuple[int, Slot | None]]) -> HostStatus:
    """Return the status of this host from the slots of its ranks."""
    ranks = (
        RankPlace(rank=rank)
        if slot is None
        else RankPlace(
            rank=rank, step=slot.step, phase=slot.phase.name if slot.phase is not None else slot.state.name
        )
        for rank, slot in slots
    )
    return HostStatus(name=name, state=state, ranks=tuple(ranks))


def write_hosts(path: Path, hosts: Sequence[HostStatus]) -> None:
    """Write the file; a disk that does not take it loses only what is shown."""
    with contextlib.suppress(OSError):
        write_json(path, [to_json(host) for host in hosts], indent=None, durable=False)


def read_hosts(path: Path) -> tuple[HostStatus, ...]:
    """Return the hosts in the file; none if there is none, or one of another version."""
    try:
        return tuple(from_json(HostStatus, one) for one in json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return ()
