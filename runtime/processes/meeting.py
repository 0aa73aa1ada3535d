"""Where the supervisors of several hosts meet: torch elastic's c10d rendezvous, with words for waits.

Membership, ranks and rounds are torch's. This adds who is waited for, where, how long and until when, and
which host is lost. The endpoint is looked for before torch connects to it, so that its absence is a sentence.
A thread looks once a second at what torch's keep-alive has read last: nothing waits for the network in the
supervisor's loop. Made by `runtime/launching/_ranks.py`, asked by the agent; decides nothing about the run.

A host is lost if torch has dropped it, after nine beats, and it cannot be reached either, or another one has
come to take its place: what is sent to a host that was cut off for some seconds arrives later than a new
connection. The endpoint's host is lost if the port is closed, or silent for as long.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from grpo_run.runtime.errors import HostsLostError
from grpo_run.runtime.upstream import rendezvous_names
from grpo_run.watchdog.text import counted

JOIN_SECONDS = 600
"""torch's default for `--rdzv-conf join_timeout`."""
LOOK_SECONDS = 1.0
DEAD_SECONDS = 3.0
"""A store that was not read for so long is looked at with a connection of its own."""
SILENT_SECONDS = 9.0
PROBE_SECONDS = 2.0
"""A connection repeats its first packet after one second."""
ENDPOINT_KEY = "grpo_run/endpoint"


class Answer(Enum):
    """What a host answers to a new connection."""

    accepted = "accepted"
    refused = "refused"
    """It is up, and nobody serves the port."""
    silent = "silent"


def probe(host: str, port: int) -> Answer:
    """Connect to a port of a host for a moment."""
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return Answer.refused
    except OSError:  # also a name that cannot be resolved yet
        return Answer.silent
    return Answer.accepted


class Meeting(RendezvousHandler):
    """torch's rendezvous of one host, connected when it is first needed.

    Args:
        parameters: torch's.
        ask: `probe`, or what stands for it.
    """

    def __init__(
        self, parameters: RendezvousParameters, *, ask: Callable[[str, int], Answer] = probe
    ) -> None:
        self._parameters = parameters
        self._ask = ask
        self._host, self._port = rendezvous_names.endpoint(parameters)
        self._limit_seconds = parameters.get_as_int("join_timeout", JOIN_SECONDS) or JOIN_SECONDS
        self._serves = rendezvous_names.serves(parameters)
        self._handler: Any = None
        self._began_at: float | None = None
        self._members: dict[Any, int] = {}
        self._endpoint_node = ""
        self._dead_endpoint = ""
        self._gone: AbstractSet[Any] = frozenset()
        self.lost = ""
        """Which host that has ranks is lost, as a sentence; empty while none is."""

    @property
    def place(self) -> str:
        """The endpoint, as the user has written it or as torch has completed it."""
        return f"{self._host}:{self._port}"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts. Called in a thread of its own, while `wait_text` is shown.

        Raises:
            HostsLostError: they have not come in time, or the endpoint is lost.
        """
        self._members, self.lost = {}, ""
        self._began_at = time.monotonic()
        try:
            if self._handler is None:
                self._connect()
            info: RendezvousInfo = self._handler.next_rendezvous()
            self._settle()
        except RendezvousTimeoutError:
            missing = self._missing()
            verb = "has" if missing == 1 else "have"
            raise HostsLostError(
                f"{missing} of {counted(self._parameters.min_nodes, 'host')} {verb} not come to {self.place}"
                f" within {self._limit_seconds} s."
            ) from None
        except RendezvousConnectionError:
            raise HostsLostError(self._no_answer()) from None
        finally:
            self._began_at = None
        return info

    def _connect(self) -> None:
        """Connect to the endpoint, when somebody listens there, or serve it."""
        assert self._began_at is not None
        while not self._serves and self._ask(self._host, self._port) is not Answer.accepted:
            if time.monotonic() - self._began_at > self._limit_seconds:
                raise HostsLostError(f"{self.place} has not answered within {self._limit_seconds} s.")
            time.sleep(LOOK_SECONDS)
        self._handler = rendezvous_registry.get_rendezvous_handler(self._parameters)
        if self._serves:  # before any host can have met this one
            node = rendezvous_names.this_node(self._handler)
            rendezvous_names.store(self._handler).set(ENDPOINT_KEY, repr(node))
        threading.Thread(target=self._look_on, name="grpo-run-hosts", daemon=True).start()

    def _settle(self) -> None:
        """Remember whom the host has met, and who of them serves the endpoint."""
        members = rendezvous_names.view(self._handler).participants
        store = rendezvous_names.store(self._handler)
        with contextlib.suppress(DistError):  # then its loss is noticed later, by the ranks
            if store.check([ENDPOINT_KEY]):
                self._endpoint_node = store.get(ENDPOINT_KEY).decode()
        self._members = dict(members)

    def _look_on(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Find out whether a host is lost. Takes as long as a connection to it may take."""
        seen, members, text = rendezvous_names.view(self._handler), self._members, ""
        if not self._serves and seen.age_seconds > DEAD_SECONDS:
            self._dead_endpoint = self._look_at_endpoint(seen.age_seconds)
            if any(repr(member) == self._endpoint_node for member in members):
                text = self._dead_endpoint
        else:
            self._dead_endpoint = ""
            text = self._look_at_members(members, seen)
        if text and members is self._members:  # else the hosts have met again
            self.lost = text

    def _look_at_members(self, members: Mapping[Any, int], seen: rendezvous_names.View) -> str:
        """Return which of the hosts that have ranks is lost; empty if none is."""
        gone = members.keys() - seen.participants.keys() - seen.waiting
        before, self._gone = self._gone, gone  # one that leaves by itself waits a moment later
        for node in sorted(gone & before):
            said = f"Host {node.addr} is lost: for {SILENT_SECONDS:.0f} s it has not said that it is alive"
            if seen.waiting:
                return f"{said}, and another one waits to take its place."
            if self._ask(node.addr, self._port) is Answer.silent:
                return f"{said}, and it cannot be reached."
        return ""

    def _look_at_endpoint(self, age_seconds: float) -> str:
        """Return that nobody serves the endpoint any more; empty if that is not so.

        Args:
            age_seconds: of what was read there last.
        """
        answer = self._ask(self._host, self._port)
        if answer is Answer.refused or (answer is Answer.silent and age_seconds > SILENT_SECONDS):
            return self._no_answer()
        return ""

    def _no_answer(self) -> str:
        said = f"{self.place}, where the hosts meet, does not answer any more"
        return f"{said}: its host or its supervisor is lost."

    def check(self) -> None:
        """Called while the host waits for others.

        Raises:
            HostsLostError: it waits in vain, because the endpoint is lost.
        """
        if self._dead_endpoint:
            raise HostsLostError(self._dead_endpoint)

    def wait_text(self) -> str:
        """Return who is waited for, where, how long and until when; empty if nobody is."""
        began_at = self._began_at
        if began_at is None:
            return ""
        clock = f"{time.monotonic() - began_at:.0f} s of {self._limit_seconds}"
        if self._handler is None:
            return f"waiting for {self.place} to answer, {clock}"
        seen = rendezvous_names.view(self._handler)
        if seen.is_spare:
            return f"waiting at {self.place} as a spare: {counted(len(seen.participants), 'host')} have ranks"
        return (
            f"waiting for {self._missing()} of {counted(self._parameters.min_nodes, 'host')} at {self.place},"
            f" {clock}"
        )

    def _missing(self) -> int:
        seen = rendezvous_names.view(self._handler)
        here = seen.waiting if seen.complete else seen.participants.keys()
        others = here - {rendezvous_names.this_node(self._handler)}
        return max(1, self._parameters.min_nodes - 1 - len(others))

    def num_nodes_waiting(self) -> int:
        """How many hosts wait to take part, as read last by torch's keep-alive.

        None as long as one that is gone may be lost: that is said first. If there are as many as may have
        ranks, only they count, when they wait for the others: one that is too many may be on its way to the
        spares.
        """
        seen = rendezvous_names.view(self._handler)
        if self._members.keys() - seen.participants.keys() - seen.waiting:
            return 0
        full = len(self._members) >= self._parameters.max_nodes
        return len(seen.waiting & self._members.keys() if full else seen.waiting)

    def get_backend(self) -> str:
        """See torch's."""
        return self._parameters.backend

    def get_run_id(self) -> str:
        """See torch's."""
        return self._parameters.run_id

    def is_closed(self) -> bool:
        """See torch's."""
        return self._handler is not None and bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """See torch's."""
        if self._handler is not None:
            self._handler.set_closed()

    def shutdown(self) -> bool:
        """See torch's."""
        return self._handler is None or bool(self._handler.shutdown())
