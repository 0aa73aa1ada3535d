"""Private names of torch elastic's c10d rendezvous: what it has read last of the hosts that take part, and
what is written into it: that a host is lost, so that torch drops it, that one stays out, and that one has
ended the run.

Called by `runtime/processes/meeting.py`, and by `cli/launching/refusal.py` on a host that does not join. The
public methods of torch's handler ask the store, which waits as long as the network does. What is written
travels in torch's own state, which all hosts read with its keep-alive: it costs no further requests, and
cannot disagree with the members.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

DEFAULT_PORT = 29400
LOST, ENDED = "grpo_run_lost", "grpo_run_ended"
"""Attributes of torch's state, which every host reads and writes as a whole. Their values have types
of Python and torch only: a host with another release can read them."""
IN_A_ROW, REFUSED, APART = "grpo_run_lost_in_a_row", "grpo_run_refused", "grpo_run_apart"
"""The same, of tables: see `View`."""
WRITE_TRIES = 20
LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)


class Ended(NamedTuple):
    """How a host has ended the run of all, and which hosts know."""

    exit_code: int
    sentence: str
    known_by: frozenset[Any]


@dataclass(frozen=True, kw_only=True)
class View:
    """What a handler has read last.

    Attributes:
        participants: the hosts of the present round, each with its rank once the round is complete.
        waiting: those that wait for the next round.
        complete: whether the hosts of this round have met.
        spares: those that wait for a host to be lost.
        is_spare: this host is one of them.
        beats: when each host has said last that it is alive, by its own clock.
        lost: those that were declared lost, and why.
        in_a_row: by address, how often a host was lost in a row.
        refused: by address, why a host has not come.
        apart: hosts that do not take part although they are there, and why.
        closes_soon: the round is not complete, and will be without further hosts.
        ended: how a host has ended the run; None while none has.
        read_at: when it was read, in monotonic seconds.
    """

    participants: Mapping[Any, int]
    waiting: frozenset[Any]
    spares: frozenset[Any]
    complete: bool
    is_spare: bool
    beats: Mapping[Any, Any]
    lost: Mapping[Any, str]
    in_a_row: Mapping[str, int]
    refused: Mapping[str, str]
    apart: Mapping[Any, str]
    closes_soon: bool
    ended: Ended | None
    read_at: float


def view(handler: Any) -> View:
    """Return what a rendezvous handler has read last, without asking the store."""
    holder = handler._state_holder
    return _view(handler, holder.state, holder._last_sync_time)


def _view(handler: Any, state: Any, read_at: float) -> View:
    ended = getattr(state, ENDED, None)
    return View(
        participants=dict(state.participants),
        waiting=frozenset(state.wait_list),
        spares=frozenset(state.redundancy_list),
        complete=state.complete,
        is_spare=handler._this_node in state.redundancy_list,
        beats=dict(state.last_heartbeats),
        lost=dict(getattr(state, LOST, {})),
        in_a_row=dict(getattr(state, IN_A_ROW, {})),
        refused=dict(getattr(state, REFUSED, {})),
        apart=dict(getattr(state, APART, {})),
        closes_soon=state.deadline is not None,
        ended=Ended(*ended) if ended is not None else None,
        read_at=read_at,
    )


def connect(place: tuple[str, int], run_id: str) -> Any:
    """Return a backend of the state at the endpoint with a connection of its own.

    That of the handler is locked while it waits for a key, as at the end of a run.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    return C10dRendezvousBackend(TCPStore(*place, is_master=False, wait_for_workers=False), run_id)


def declare_lost(backend: Any, node: Any, why: str, in_a_row: int) -> None:
    """Let torch drop a host at once, on all hosts, and say why. Waits for the store."""

    def change(state: Any) -> None:
        if node in state.last_heartbeats:
            state.last_heartbeats[node] = LONG_AGO
        _put(state, LOST, node, why)
        _put(state, APART, node, None)
        _put(state, IN_A_ROW, node.addr, in_a_row)

    _write(backend, change)


def refuse(backend: Any, address: str, why: str) -> bool:
    """Say why a host does not come, unless another supervisor there takes part; return False if nobody has
    come yet. Waits for the store.
    """

    def change(state: Any) -> None:
        present = any(node.addr == address and node.pid != os.getpid() for node in state.last_heartbeats)
        _put(state, REFUSED, address, None if present else why)

    return _write(backend, change)


def note(backend: Any, table: str, key: Any, value: Any = None) -> None:
    """Write an entry of `IN_A_ROW`, `REFUSED` or `APART`; without a value, remove it. Waits for the store."""
    _write(backend, lambda state: _put(state, table, key, value))


def _put(state: Any, table: str, key: Any, value: Any) -> None:
    entries = {**getattr(state, table, {}), key: value}
    setattr(state, table, {key: value for key, value in entries.items() if value is not None})


def end(backend: Any, node: Any, exit_code: int, sentence: str) -> None:
    """Say how a host has ended the run, unless another one has, and that it knows. Waits for the store."""

    def change(state: Any) -> None:
        code, text, known_by = getattr(state, ENDED, None) or (exit_code, sentence, ())
        setattr(state, ENDED, (code, text, frozenset({*known_by, node})))

    _write(backend, change)


def _write(backend: Any, change: Callable[[Any], None]) -> bool:
    """Change the state at the endpoint, as torch does: again if another host was faster.

    torch's own copy is left alone: another thread may use it.

    Returns:
        whether there was a state: some host has come.
    """
    for _ in range(WRITE_TRIES):
        found = backend.get_state()
        if found is None:
            return False
        state = pickle.loads(found[0])
        change(state)
        done = backend.set_state(pickle.dumps(state), found[1])
        if done is not None and done[2]:
            break
    return True


def name_uniquely() -> None:
    """Tell the next handler of this process from any other: torch names a host by its address and pid, which
    are the same again after a container has been started again.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    DynamicRendezvousHandler._node_desc_generator._local_id = secrets.randbits(32)


def require(handler: Any, hosts: int) -> None:
    """Let no round of the handler be complete with fewer hosts."""
    object.__setattr__(handler.settings, "min_nodes", hosts)


def stop_beats(handler: Any) -> None:
    """End the thread that tells the others that this host is alive; waits for its last message."""
    handler._stop_heartbeats()


def this_node(handler: Any) -> Any:
    """Return how the handler names its host."""
    return handler._this_node


def read_now(handler: Any, backend: Any) -> View:
    """Read the state; waits for the store."""
    found = backend.get_state()
    state = pickle.loads(found[0]) if found is not None else handler._state_holder.state
    return _view(handler, state, time.monotonic())


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
