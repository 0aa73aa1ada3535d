"""Which hosts stay out of a run over several, and what is said of them. Pure.

A host that was lost twice in a row is likely to be lost again, and each loss costs all hosts a restart. While
the others suffice, that is as many as `--nnodes` needs at least, it waits apart from torch's rendezvous; it
takes part when they do not. A host that was refused has not come at all. `meeting.py` asks here when a host
is about to join and when one is lost, and tells the other hosts; nothing else decides on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.upstream.rendezvous_names import View

ROW_SECONDS = 3600.0
"""A host that took part for so long before it was lost is not lost in a row."""
MOST_LOSSES = 2
"""In a row, from which on a host stays out."""


def losses_in_a_row(before: int, lasted_seconds: float) -> int:
    """Return how often a host with ranks was lost in a row that is lost now.

    Args:
        before: how often it was before.
        lasted_seconds: how long it was there since it was started again.
    """
    return 1 if lasted_seconds >= ROW_SECONDS else before + 1


def why_apart(seen: View, node: Any, needed: int) -> str:
    """Return why a host stays out, as a clause; empty if it takes part.

    Args:
        seen: of the rendezvous.
        node: the host.
        needed: how many hosts the run needs at least.
    """
    losses = seen.in_a_row.get(node.addr, 0)
    others = (seen.participants.keys() | seen.waiting | seen.spares) - {node}
    wait_for_all = len(seen.participants) >= needed and not (seen.complete or seen.closes_soon)
    if losses < MOST_LOSSES or len(others) < needed or wait_for_all:
        return ""
    return (
        f"stays out, because it was lost {losses} times in a row, and takes part when the others do not"
        f" suffice; to let it back now, repair it and start it again with --rdzv-conf readmit=1"
    )


def outside(seen: View) -> Mapping[str, str]:
    """Return what is said of the hosts that do not take part, by address, as clauses."""
    return {**seen.refused, **{node.addr: why for node, why in seen.apart.items()}}


def needed_text(seen: View) -> str:
    """Return what is said of hosts while they are waited for, because the others do not suffice."""
    here = {node.addr for node in (*seen.participants, *seen.waiting, *seen.spares, *seen.apart)}
    lost = {
        address: f"was lost {losses} times in a row and is needed, because no other one is there"
        for address, losses in seen.in_a_row.items()
        if losses >= MOST_LOSSES and address not in here
    }
    return "".join(f"; host {address} {text}" for address, text in {**lost, **outside(seen)}.items())
