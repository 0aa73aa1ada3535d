"""Private names of torch elastic's c10d rendezvous: what it has read last of the hosts that take part.

Called by `runtime/processes/meeting.py`. The public methods of torch's handler ask the store, which waits as
long as the network does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_PORT = 29400


@dataclass(frozen=True, kw_only=True)
class View:
    """What a handler has read last.

    Attributes:
        participants: the hosts of the present round, each with its rank once the round is complete.
        waiting: those that wait for the next round.
        complete: whether the hosts of this round have met.
        is_spare: this host waits for one of them to be lost.
        age_seconds: since it was read.
    """

    participants: Mapping[Any, int]
    waiting: frozenset[Any]
    complete: bool
    is_spare: bool
    age_seconds: float


def view(handler: Any) -> View:
    """Return what a rendezvous handler has read last, without asking the store."""
    holder = handler._state_holder
    state = holder.state
    return View(
        participants=dict(state.participants),
        waiting=frozenset(state.wait_list),
        complete=state.complete,
        is_spare=handler._this_node in state.redundancy_list,
        age_seconds=time.monotonic() - max(holder._last_sync_time, 0.0),
    )


def this_node(handler: Any) -> Any:
    """Return how the handler names its host."""
    return handler._this_node


def store(handler: Any) -> Any:
    """Return the store at the endpoint."""
    return handler._store


def endpoint(parameters: Any) -> tuple[str, int]:
    """Return host and port of the endpoint."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    return host, port


def serves(parameters: Any) -> bool:
    """Return whether this host serves the endpoint."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    said = parameters.get_as_bool("is_host")
    host, _ = endpoint(parameters)
    return bool(_matches_machine_hostname(host) if said is None else said)
