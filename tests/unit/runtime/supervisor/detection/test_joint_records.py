"""Records of several hosts prove a deadlock only if all of them held at one moment."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.builders.watchdog.deadlock_shell import records

from grpo_run.runtime.processes.host_exchange import Clock, HostExchange
from grpo_run.runtime.supervisor.detection._joint_records import JointRecords
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads


class Network:
    """A clock, and what hosts have told."""

    def __init__(self) -> None:
        self.time = 0
        self.told: dict[tuple[int, str], bytes] = {}


class Host:
    """A host with one rank, whose number is that of the host."""

    nodes = 2

    def __init__(self, network: Network, node: int) -> None:
        self.network, self.node = network, node
        self.beats, self.clock, self.silent = 0, Clock(0, 0), 0.0
        self.joint = JointRecords(cast(HostExchange, self), 2)

    def beat(self) -> None:
        self.beats += 1
        self.network.time += 1
        self.clock = Clock(self.beats, self.network.time)

    def publish(self, name: str, payload: bytes) -> bool:
        self.network.told[self.node, name] = payload
        return True

    def latest(self, name: str) -> dict[int, bytes]:
        told = self.network.told
        return {node: told[node, name] for node in (0, 1) if node != self.node and (node, name) in told}

    def silent_seconds(self, node: int) -> float:
        return self.silent

    def poll(self, *words: str, **facts: Any) -> Deadlock | None:
        position = Position(rank=self.node, records=records(*words), **facts)
        position = without_other_threads(position) if "waiting_threads" not in facts else position
        return self.joint.prove(words, {self.node: position}, self.joint.time)


@pytest.fixture
def pair() -> tuple[Host, Host]:
    """Two hosts."""
    network = Network()
    return Host(network, 0), Host(network, 1)


GATHER, LATER = ("past", "gather"), ("past", "later")


def _both(pair: tuple[Host, Host], rounds: int = 4) -> list[Deadlock | None]:
    """Both hosts poll in turn, with a beat after each poll."""
    found = []
    for _ in range(rounds):
        for host, words in zip(pair, (GATHER, LATER), strict=True):
            found.append(host.poll(*words))
            host.beat()
    return found


def test_both_hosts_prove_the_same(pair: tuple[Host, Host]) -> None:
    """Each by itself, with the ranks of both in the sentence; not before each was polled twice."""
    found = _both(pair)
    proved = {one.sentence for one in found if one is not None}
    assert len(proved) == 1
    assert "rank 0 is in all_gather" in proved.pop()
    assert found[:3] == [None, None, None]
    assert None not in found[-2:]
    assert pair[0].joint.is_due


def test_records_that_never_held_together_prove_nothing(pair: tuple[Host, Host]) -> None:
    """The first host had moved on before the records of the second one were first seen."""
    here, there = pair
    for _ in range(3):
        assert here.poll(*GATHER) is None
        here.beat()
    here.joint.withdraw()
    for _ in range(3):
        there.beat()
        assert there.poll(*LATER) is None
    # one that has not moved, but was not polled since, is a matter of its next poll
    here, there = Host(Network(), 0), Host(here.network, 1)
    there.network = here.network
    for _ in range(3):
        assert here.poll(*GATHER) is None
        here.beat()
    for _ in range(3):
        there.beat()
        assert there.poll(*LATER) is None
    assert here.joint.is_due
    here.beat()
    assert here.poll(*GATHER) is not None


def test_a_host_that_is_not_heard_cannot_be_told(pair: tuple[Host, Host]) -> None:
    """Although it has told enough for a proof before."""
    _both(pair, rounds=2)
    pair[0].silent = 5.0
    pair[0].beat()
    assert pair[0].poll(*GATHER) is None
    assert not pair[0].joint.is_due


def test_all_ranks_in_one_collective_are_not_looked_at_again(pair: tuple[Host, Host]) -> None:
    """The link may be slow; the records of the other hosts are not even read."""
    for _ in range(4):
        for host in pair:
            assert host.poll(*GATHER) is None
            host.beat()
    assert not any(host.joint.is_due for host in pair)


def test_a_rank_with_a_thread_that_may_act_proves_nothing(pair: tuple[Host, Host]) -> None:
    """And the same records are not judged twice."""
    for _ in range(4):
        assert pair[0].poll(*GATHER) is None
        pair[0].beat()
        assert pair[1].poll("past", "vote.", waiting_threads=None) is None
        pair[1].beat()
    assert not any(host.joint.is_due for host in pair)


def test_a_network_that_stands_still_costs_no_polls(pair: tuple[Host, Host]) -> None:
    """Before the exchange has beaten again, another poll can tell nothing."""
    assert pair[0].poll(*GATHER) is None
    assert not pair[0].joint.is_due
    pair[0].beat()
    assert pair[0].joint.is_due
