"""What the supervisors of a run over several hosts tell one another: named payloads, and who is heard.

Each attempt has one exchange, over a connection of its own to the attempt's store. A thread of its own does
all of the talking, so nothing in the supervisor's loop waits for the network: `publish` and `latest` return
at once, and `wait` has a limit. A beat is one small write and one read for all hosts; payloads are read when
they have changed. A host that is not heard may be cut off or gone: its own port tells, which every exchange
opens and never serves. Made by the agent, used by `runtime/supervisor/other_hosts.py`. Judges nothing.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from grpo_run.runtime.processes.signs_of_life import Answer, probe

BEAT_SECONDS = 0.25
BUSY_BEAT_SECONDS = 0.05
"""While an answer is waited for."""
AGAIN_SECONDS = 0.5
"""Between two attempts to connect."""
STORE_TIMEOUT = timedelta(seconds=2)
MAX_PAYLOAD_BYTES = 256 * 1024
LOST_SECONDS = 5.0
"""A supervisor that is killed takes its ranks with it, and theirs fail sooner than that."""
MAX_PROBED = 16
"""Hosts that are asked at a time whether they are there."""
FAULT = "fault"
"""The payload of which hosts confirm that they have it."""
CLOCK = "grpo_run/hosts/clock"


def _key(node: int, name: str = "") -> str:
    return f"grpo_run/hosts/{node}/{name}"


@dataclass(kw_only=True)
class _Heard:
    """What is known of another host."""

    head: Mapping[str, Any]
    at: float
    payloads: dict[str, tuple[int, bytes]] = field(default_factory=dict)


class Clock(NamedTuple):
    """A time that is the same on all hosts: it grows with every beat of any of them.

    `value` was read in beat number `beat` of this host.
    """

    beat: int
    value: int


class HostExchange:
    """The exchange of one attempt.

    Args:
        address: of the attempt's store.
        node: number of this host in this attempt.
        nodes: how many have ranks.
        served: the store, where this host serves it: it lives as long as the exchange, because other hosts
            may still read there what ended the attempt.
    """

    def __init__(self, address: tuple[str, int], *, node: int, nodes: int, served: object = None) -> None:
        self.node, self.nodes = node, nodes
        self.name = socket.gethostname()
        self._address = address
        self._served = served
        self._lock = threading.Lock()
        self._published: dict[str, tuple[int, bytes]] = {}
        self._heard: dict[int, _Heard] = {}
        self._wake, self._changed = threading.Event(), threading.Event()
        self._busy_until = 0.0
        self.beats = 0
        """How many have begun."""
        self._closed = False
        self._began_at = time.monotonic()
        self.clock = Clock(0, 0)
        self._thread = threading.Thread(target=self._run, name="grpo-run-exchange", daemon=True)
        self._thread.start()

    @property
    def others(self) -> list[int]:
        """The numbers of the other hosts."""
        return [node for node in range(self.nodes) if node != self.node]

    def publish(self, name: str, payload: bytes) -> bool:
        """Tell the other hosts, soon, in place of what had this name; False if it is too long to be told."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            return False
        with self._lock:
            version, before = self._published.get(name, (0, None))
            if payload != before:
                self._published[name] = version + 1, payload
        self._wake.set()
        return True

    def latest(self, name: str) -> dict[int, bytes]:
        """Return what the other hosts have published under a name, as far as it was read, by number."""
        with self._lock:
            found = {node: heard.payloads.get(name) for node, heard in self._heard.items()}
        return {node: one[1] for node, one in found.items() if one is not None}

    def name_of(self, node: int) -> str:
        """How a host calls itself; its number if it was never heard."""
        heard = self._heard.get(node)
        return str(heard.head["host"] if heard is not None else node)

    def silent_seconds(self, node: int) -> float:
        """For how long a host was not heard; since the beginning if it never was."""
        heard = self._heard.get(node)
        return time.monotonic() - (heard.at if heard is not None else self._began_at)

    def has_confirmed(self, node: int) -> bool:
        """Whether a host has this one's `FAULT`."""
        heard = self._heard.get(node)
        return heard is not None and self.node in heard.head["have"]

    def hurry(self, seconds: float) -> None:
        """Beat fast for a while."""
        self._busy_until = time.monotonic() + seconds
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait until another host has said something new, for so long at most."""
        self._changed.wait(seconds)
        self._changed.clear()

    def look_for(self, nodes: Sequence[int]) -> dict[int, Answer]:
        """Ask hosts whether they are there, all at once; takes as long as a connection may take.

        One that refuses is up, and has no supervisor any more. One that was never heard, or not for long, is
        silent: a fault does not wait for it.
        """
        asked = [node for node in nodes if node in self._heard and self.silent_seconds(node) < LOST_SECONDS]
        ports = {node: self._heard[node].head["port"] for node in asked[:MAX_PROBED]}
        with ThreadPoolExecutor(MAX_PROBED) as pool:
            found = dict(zip(ports, pool.map(lambda port: probe(*port), ports.values()), strict=True))
        return dict.fromkeys(nodes, Answer.silent) | found

    def close(self, wait_seconds: float = 0.0) -> None:
        """End the thread, and then the store if this host serves it.

        Args:
            wait_seconds: how long the thread is waited for. A process that exits while a thread returns from
                C++ is aborted.
        """
        self._closed = True
        self._wake.set()
        self._thread.join(wait_seconds)
        self._served = None

    def _run(self) -> None:
        while not self._closed:
            try:
                # also finds the address under which others can reach this host
                with socket.create_connection(self._address, STORE_TIMEOUT.total_seconds()) as found:
                    own, family = found.getsockname()[0], found.family
                with socket.create_server((own, 0), family=family) as port:
                    store = TCPStore(*self._address, is_master=False, wait_for_workers=False,
                                     timeout=STORE_TIMEOUT)  # fmt: skip
                    self._talk(store, (own, port.getsockname()[1]))
            except (DistError, OSError):  # it is not heard, and hears nobody, until it is connected again
                self._wake.wait(AGAIN_SECONDS)
                self._wake.clear()

    def _talk(self, store: TCPStore, port: tuple[str, int]) -> None:
        sent: dict[str, int] = {}
        while not self._closed:
            self._beat(store, port, sent)
            busy = time.monotonic() < self._busy_until
            if self._wake.wait(BUSY_BEAT_SECONDS if busy else BEAT_SECONDS):
                self._wake.clear()

    def _beat(self, store: TCPStore, port: tuple[str, int], sent: dict[str, int]) -> None:
        """Tell what is new here, and read what is new elsewhere."""
        with self._lock:
            new = {name: one for name, one in self._published.items() if sent.get(name) != one[0]}
        for name, (version, payload) in new.items():
            store.set(_key(self.node, name), payload)  # type: ignore[arg-type]  # it takes bytes
            sent[name] = version
        self.beats += 1
        have = [node for node, heard in self._heard.items() if FAULT in heard.payloads]
        head = {"beat": self.beats, "host": self.name, "port": port, "have": have, "payloads": sent}
        store.set(_key(self.node), json.dumps(head))
        self.clock = Clock(self.beats, store.add(CLOCK, 1))
        met = [node for node in self.others if node in self._heard or store.check([_key(node)])]
        for node, text in zip(met, store.multi_get([_key(node) for node in met]) if met else (), strict=True):
            self._read(store, node, json.loads(text))

    def _read(self, store: TCPStore, node: int, head: Mapping[str, Any]) -> None:
        heard = self._heard.get(node)
        if heard is not None and heard.head["beat"] == head["beat"]:
            return
        payloads = dict(heard.payloads) if heard is not None else {}
        for name, version in head["payloads"].items():
            if payloads.get(name, (0, b""))[0] != version:
                payloads[name] = version, store.get(_key(node, name))
                if name == FAULT:
                    self.hurry(STORE_TIMEOUT.total_seconds())
        with self._lock:
            self._heard[node] = _Heard(head=head, at=time.monotonic(), payloads=payloads)
        self._changed.set()
