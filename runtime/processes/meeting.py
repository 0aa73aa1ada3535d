"""Where the supervisors of several hosts meet: torch elastic's c10d rendezvous, with words for waits.

Membership, ranks and rounds are torch's. This adds who is waited for, where, how long and until when, which
host is lost, and that one has ended the run. The endpoint is looked for before torch connects to it, so that
its absence is a sentence. A thread looks twice a second at what torch's keep-alive has read last, and
at ports: the supervisor's loop does not wait for the network. Made by `runtime/launching/_ranks.py`, asked by
the agent; decides nothing about the run.

The host of the endpoint looks at all others and writes into torch's state which one is lost (see
`signs_of_life.py`); torch then drops it everywhere. The others look at the endpoint. A host that is cut off
takes it for lost, as one cannot see from there which of the two it is. If only a store is there, without a
supervisor, each host looks at those that torch has dropped. One that is to stay out (`_outside_hosts.py`)
waits before it joins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
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

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_USAGE, HostsLostError
from grpo_run.runtime.processes import _outside_hosts as outside_hosts
from grpo_run.runtime.processes.signs_of_life import (
    AGAIN_SECONDS,
    LOOK_SECONDS,
    Answer,
    Signs,
    listen,
    own_address,
    probe,
)
from grpo_run.runtime.upstream import rendezvous_names
from grpo_run.watchdog.text import counted

JOIN_SECONDS = 600
"""torch's default for `--rdzv-conf join_timeout`."""
ENDPOINT_KEY = "grpo_run/endpoint"
ALIVE_KEY = "grpo_run/alive/"
"""Where a host can be reached that has this name in torch's rendezvous."""
SOON_SECONDS = 1.0
"""For the look that is under way and the one after it."""
LEAVE_SECONDS = 6.0
"""How long a host that ends the run waits until the others have read that."""
CLOSE_SECONDS = 2.0
"""How long a thread is waited for. One that waits for a host that is gone returns too late to matter."""
MOST_PROBES = 32
"""At the same time."""
ENDS = {EXIT_GAVE_UP: "gave up", EXIT_USAGE: "was refused", EXIT_FINISHED: "has finished the run"}
"""Exit codes with which one host ends the run of all, and of spares."""


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
        self._needed = parameters.min_nodes
        self._host, self._port = rendezvous_names.endpoint(parameters)
        self._limit_seconds = parameters.get_as_int("join_timeout", JOIN_SECONDS) or JOIN_SECONDS
        self._serves = rendezvous_names.serves(parameters)
        self._handler: Any = None
        self._backend: Any = None
        self._began_at: float | None = None
        self._members: dict[Any, int] = {}
        self._endpoint_node = ""
        self._dead_endpoint = ""
        self._gone: AbstractSet[Any] = frozenset()
        self._places: dict[Any, tuple[str, int]] = {}
        self._signs: dict[Any, Signs] = {}
        self._pool = ThreadPoolExecutor(MOST_PROBES, "grpo-run-probe")
        self._wake, self._looked = threading.Event(), threading.Event()
        self._looking: threading.Thread | None = None
        self._closed = False
        self.lost = ""
        """Which host that has ranks is lost, as a sentence; empty while none is."""

    @property
    def place(self) -> str:
        """The endpoint, as the user has written it or as torch has completed it."""
        return f"{self._host}:{self._port}"

    @property
    def can_meet(self) -> bool:
        """Whether the endpoint is not lost, as far as is known."""
        return not self._dead_endpoint

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
            if not self._serves:
                self._wait_apart()
            info: RendezvousInfo = self._handler.next_rendezvous()
            self._settle()
        except RendezvousTimeoutError:
            missing = self._missing()
            verb = "has" if missing == 1 else "have"
            named = outside_hosts.needed_text(rendezvous_names.view(self._handler))
            raise HostsLostError(
                f"{missing} of {counted(self._needed, 'host')} {verb} not come to {self.place}"
                f" within {self._limit_seconds} s{named}."
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
        rendezvous_names.name_uniquely()
        handler = rendezvous_registry.get_rendezvous_handler(self._parameters)
        self._backend = rendezvous_names.connect((self._host, self._port), self._parameters.run_id)
        self._handler = handler
        node, store = rendezvous_names.this_node(self._handler), rendezvous_names.store(self._handler)
        with contextlib.suppress(DistError):  # then joining fails, too
            if self._serves:  # before any host can have met this one
                store.set(ENDPOINT_KEY, repr(node))
            else:
                place = f"{own_address(self._host, self._port)} {listen()}"
                store.set(f"{ALIVE_KEY}{node!r}", place)
        self._looking = threading.Thread(target=self._look_on, name="grpo-run-hosts", daemon=True)
        self._looking.start()

    def _wait_apart(self) -> None:
        """Return when this host may join: at once, unless it is to stay out."""
        node, apart = rendezvous_names.this_node(self._handler), ""
        if self._parameters.get_as_bool("readmit"):
            rendezvous_names.note(self._backend, rendezvous_names.IN_A_ROW, node.addr)
        while not self._handler.is_closed():  # which reads the state
            seen = rendezvous_names.view(self._handler)
            if node.addr in seen.refused:
                rendezvous_names.note(self._backend, rendezvous_names.REFUSED, node.addr)
            if not (why := outside_hosts.why_apart(seen, node, self._parameters.min_nodes)):
                break
            if not apart:
                rendezvous_names.note(self._backend, rendezvous_names.APART, node, apart := why)
            time.sleep(SOON_SECONDS)
        if apart:
            rendezvous_names.note(self._backend, rendezvous_names.APART, node)

    def outside(self) -> Mapping[str, str]:
        """Return what is said of the hosts that do not take part, by address, as clauses."""
        return outside_hosts.outside(rendezvous_names.view(self._handler)) if self._handler else {}

    def _settle(self) -> None:
        """Remember whom the host has met, and who of them serves the endpoint."""
        members = rendezvous_names.view(self._handler).participants
        store = rendezvous_names.store(self._handler)
        with contextlib.suppress(DistError):  # then its loss is noticed later, by the ranks
            if store.check([ENDPOINT_KEY]):
                self._endpoint_node = store.get(ENDPOINT_KEY).decode()
        self._members = dict(members)

    def _look_on(self) -> None:
        while not self._closed:
            asked_at, asked_for = time.monotonic(), self._wake.is_set()
            self._wake.clear()
            self.look()
            if asked_for:  # not for a look that began before
                self._looked.set()
            self._wake.wait(max(0.0, asked_at + LOOK_SECONDS - time.monotonic()))

    def look_soon(self) -> None:
        """A rank has failed: look at the hosts before that is judged, which takes a moment."""
        self._looked.clear()
        self._wake.set()
        self._looked.wait(SOON_SECONDS)

    def look(self) -> None:
        """Find out whether a host is lost. Takes as long as a connection to it may take."""
        seen, members, text = rendezvous_names.view(self._handler), self._members, ""
        if self._serves:
            text = self._look_at_hosts(members.keys(), seen)
        else:
            self._dead_endpoint = self._look_at_endpoint(seen)
            gone = members.keys() - seen.participants.keys() - seen.waiting
            text = next((seen.lost[node] for node in sorted(gone) if node in seen.lost), "")
            if gone and not self._endpoint_node:  # no supervisor is there that looks at the hosts
                with contextlib.suppress(DistError, RendezvousConnectionError):  # the endpoint is looked at
                    text = text or self._look_at_hosts(gone, seen)
            if any(repr(member) == self._endpoint_node for member in members):
                text = text or self._dead_endpoint
        if text and members is self._members:  # else the hosts have met again
            self.lost = text
        self._confirm_end(seen)

    def _confirm_end(self, seen: rendezvous_names.View) -> None:
        """Let the host that has ended the run know that this one has read it."""
        this = rendezvous_names.this_node(self._handler)
        if seen.ended is not None and this not in seen.ended.known_by and not self._dead_endpoint:
            with contextlib.suppress(RendezvousConnectionError):  # nobody waits for that any more
                rendezvous_names.end(self._backend, this, *seen.ended[:2])

    def _look_at_hosts(self, members: AbstractSet[Any], seen: rendezvous_names.View) -> str:
        """Declare hosts lost that are; return which of the members is one, empty if none is."""
        present = seen.participants.keys() | seen.waiting | seen.spares | seen.apart.keys()
        gone = members - present
        before, self._gone = self._gone, gone  # one that leaves by itself waits a moment later
        others = (present | (gone - seen.lost.keys())) - {rendezvous_names.this_node(self._handler)}
        # one that was declared lost while the hosts met is a member all the same
        text = next((seen.lost[node] for node in sorted(gone & seen.lost.keys())), "")
        nodes, asked_at = sorted(others), time.monotonic()
        for node, answer in zip(nodes, self._pool.map(self._ask_host, nodes), strict=True):
            signs = self._signs.setdefault(node, Signs(asked_at))
            why = signs.why_lost(
                answer, seen.beats.get(node), asked_at=asked_at, dropped=node in gone & before
            )
            if why and (now := self._read()).ended is None:  # else it has said why
                lost = f"Host {node.addr} is lost: {why}."
                row, lasted_seconds = now.in_a_row.get(node.addr, 0), asked_at - signs.seen_at
                if node in members - now.lost.keys():  # torch may drop it a look later
                    row = outside_hosts.losses_in_a_row(row, lasted_seconds)
                text = text or (lost if node in members else "")
                rendezvous_names.declare_lost(self._backend, node, lost, row)
        return text

    def _ask_host(self, node: Any) -> Answer:
        if (place := self._places.get(node)) is None:
            store, key = rendezvous_names.store(self._handler), f"{ALIVE_KEY}{node!r}"
            if not store.check([key]):  # a host without our launcher
                return Answer.silent
            address, port = store.get(key).decode().split()
            place = self._places[node] = (address, int(port))
        return self._ask(*place)

    def _look_at_endpoint(self, seen: rendezvous_names.View) -> str:
        """Return that nobody serves the endpoint any more; empty if that is not so."""
        asked_at = time.monotonic()
        answer = self._ask(self._host, self._port)
        signs = self._signs.setdefault(None, Signs(asked_at, reached=True))
        return self._no_answer() if signs.why_lost(answer, seen.read_at, asked_at=asked_at) else ""

    def _no_answer(self) -> str:
        said = f"{self.place}, where the hosts meet, does not answer any more"
        return f"{said}: its host or its supervisor is lost."

    def check_ended(self) -> None:
        """Called while the host has ranks.

        Raises:
            HostsLostError: another host has ended the run of all.
        """
        if self._handler is not None and (ended := rendezvous_names.view(self._handler).ended) is not None:
            raise HostsLostError(ended.sentence, exit_code=ended.exit_code)

    def leave(self, exit_code: int | None, sentence: str, *, alone: bool = False) -> None:
        """Let the other hosts know that this one has given up or was refused, and spares that the run has
        finished. Waits some seconds at most.

        Args:
            exit_code: of this host; with others, the others may go on without it.
            sentence: how the run ended here.
            alone: the others go on without it, or wait for it, if it does not serve the endpoint.
        """
        if self._handler is None:
            return
        if exit_code in ENDS and not self._dead_endpoint:
            _call(LEAVE_SECONDS, self._tell, exit_code, sentence, alone)
        _call(CLOSE_SECONDS, self._confirm_end, rendezvous_names.view(self._handler))
        # a process that exits while a thread returns from C++ is aborted
        self._closed = True
        self._wake.set()
        _call(CLOSE_SECONDS, rendezvous_names.stop_beats, self._handler)
        if self._looking is not None:
            self._looking.join(CLOSE_SECONDS)

    def _tell(self, exit_code: int, sentence: str, alone: bool) -> None:
        this, finished = rendezvous_names.this_node(self._handler), exit_code == EXIT_FINISHED
        with contextlib.suppress(RendezvousConnectionError):  # the endpoint is gone: all know
            if finished and not self._serves and self._endpoint_node:  # the host that serves it tells
                return
            if exit_code == EXIT_GAVE_UP and alone and not (self._serves or self._read().ended):
                rendezvous_names.refuse(self._backend, this.addr, f"gave up: {sentence.rstrip('.')}")
                return
            rendezvous_names.end(
                self._backend, this, exit_code, f"Host {this.addr} {ENDS[exit_code]}: {sentence}"
            )
            while self._serves:  # what is written here goes with this process
                seen = self._read()
                others = seen.beats.keys() - (self._members.keys() if finished else set())
                if seen.ended is None or others | seen.apart.keys() <= {*seen.ended.known_by, this}:
                    return
                time.sleep(AGAIN_SECONDS)

    def _read(self) -> rendezvous_names.View:
        return rendezvous_names.read_now(self._handler, self._backend)

    def check(self) -> None:
        """Called while the host waits for others.

        Raises:
            HostsLostError: it waits in vain, because the endpoint is lost or another host has ended the run.
        """
        self.check_ended()
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
        if seen.complete and len(seen.participants) >= self._needed:
            apart = rendezvous_names.this_node(self._handler) in seen.apart
            return f"waiting at {self.place} until the others {'need it' if apart else 'restart their ranks'}"
        if len(seen.participants) >= self._needed and not seen.complete:
            return f"{counted(len(seen.participants), 'host')} at {self.place}, waiting a moment for more"
        missing = f"{self._missing()} of {counted(self._needed, 'host')}"
        return f"waiting for {missing} at {self.place}, {clock}{outside_hosts.needed_text(seen)}"

    def _missing(self) -> int:
        seen = rendezvous_names.view(self._handler)
        here = seen.waiting if seen.complete else seen.participants.keys()
        others = here - {rendezvous_names.this_node(self._handler)}
        return max(1, self._needed - 1 - len(others))

    def change_text(self) -> str:
        """Return which hosts wait to take part, as a clause."""
        waiting = sorted(rendezvous_names.view(self._handler).waiting)
        return " and ".join(
            f"host {node.addr} {'restarts its ranks' if node in self._members else 'joins'}"
            for node in waiting
        )

    def member_waits(self) -> bool:
        """Whether a host with ranks has ended them to start them again."""
        return not self._members.keys().isdisjoint(rendezvous_names.view(self._handler).waiting)

    def require_all(self) -> None:
        """Do not go on with fewer hosts than the run may have."""
        self._needed = self._parameters.max_nodes
        rendezvous_names.require(self._handler, self._needed)

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


def _call(wait_seconds: float, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a thread, and wait for so long at most."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(wait_seconds)
