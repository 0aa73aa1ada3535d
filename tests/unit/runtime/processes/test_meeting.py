"""Which host is lost, and what is said of those that are waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from grpo_run.runtime.errors import HostsLostError
from grpo_run.runtime.processes.meeting import Answer, Meeting


@dataclass(frozen=True, order=True)
class Node:
    """A host, as torch describes it."""

    addr: str


ONE, TWO, THREE = Node("node0"), Node("node1"), Node("node2")


@dataclass
class Network:
    """What hosts answer to a connection."""

    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __call__(self, host: str, port: int) -> Answer:
        self.asked.append(host)
        return self.answers.get(host, Answer.accepted)


class Handler:
    """torch's handler of a host, after all have met."""

    def __init__(self, node: Node) -> None:
        self._this_node = node
        self._store = SimpleNamespace(check=lambda keys: True, get=lambda key: repr(ONE).encode())
        self._state_holder = SimpleNamespace(
            state=SimpleNamespace(
                participants={ONE: 0, TWO: 1}, wait_list=set(), redundancy_list=set(), complete=True
            ),
            _last_sync_time=time.monotonic(),
        )
        self.fails: Exception | None = None

    @property
    def state(self) -> Any:
        return self._state_holder.state

    def silent(self, seconds: float) -> None:
        """Nothing was read for so long."""
        self._state_holder._last_sync_time = time.monotonic() - seconds

    def next_rendezvous(self) -> None:
        if self.fails is not None:
            raise self.fails


def _met(node: Node) -> tuple[Meeting, Handler, Network]:
    """Return the meeting of a host; `node0` serves the endpoint."""
    network, handler = Network(), Handler(node)
    parameters = RendezvousParameters(
        "c10d", "node0:29500", "pair", 2, 2, is_host=str(node == ONE), join_timeout="40"
    )
    meeting = Meeting(parameters, ask=network)
    meeting._handler = handler
    meeting.next_rendezvous()
    return meeting, handler, network


def _looked(meeting: Meeting, times: int = 2) -> str:
    for _ in range(times):
        meeting.look()
    return meeting.lost


def test_nobody_is_lost_while_all_are_heard() -> None:
    """And nobody is asked."""
    meeting, _, network = _met(ONE)
    assert _looked(meeting) == ""
    assert network.asked == []


def test_a_host_that_is_dropped_and_cannot_be_reached_is_lost() -> None:
    """Until the hosts meet again."""
    meeting, handler, network = _met(ONE)
    del handler.state.participants[TWO]
    network.answers["node1"] = Answer.silent
    assert _looked(meeting).startswith("Host node1 is lost: ")
    meeting.next_rendezvous()
    assert meeting.lost == ""


@pytest.mark.parametrize("answer", [Answer.accepted, Answer.refused])
def test_a_dropped_host_that_answers_is_not_lost(answer: Answer) -> None:
    """It was cut off, or its supervisor is slow; what was sent to it is still under way."""
    meeting, handler, network = _met(ONE)
    del handler.state.participants[TWO]
    network.answers["node1"] = answer
    assert _looked(meeting, 5) == ""


def test_a_host_that_leaves_to_meet_again_is_not_lost() -> None:
    """It is no participant for a moment, then it waits, and that is a change of the members."""
    meeting, handler, network = _met(ONE)
    network.answers["node1"] = Answer.silent
    del handler.state.participants[TWO]
    assert _looked(meeting, 1) == ""
    handler.state.wait_list.add(TWO)
    assert _looked(meeting) == ""
    assert meeting.num_nodes_waiting() == 1


def test_a_spare_takes_the_place_of_a_host_that_is_named_first() -> None:
    """That the spare waits is no change of the members until the loss is a fault."""
    meeting, handler, network = _met(ONE)
    del handler.state.participants[TWO]
    handler.state.wait_list.add(THREE)
    assert meeting.num_nodes_waiting() == 0
    assert _looked(meeting).endswith("and another one waits to take its place.")
    assert network.asked == []


@pytest.mark.parametrize(
    ("answer", "seconds", "lost"),
    [
        (Answer.refused, 4, True), (Answer.silent, 10, True), (Answer.silent, 8, False),
        (Answer.accepted, 60, False), (Answer.refused, 2, False),
    ],
)  # fmt: skip
def test_the_endpoint_is_lost_if_closed_or_long_silent(answer: Answer, seconds: float, lost: bool) -> None:
    """A closed port proves it at once."""
    meeting, handler, network = _met(TWO)
    network.answers["node0"] = answer
    handler.silent(seconds)
    assert bool(_looked(meeting)) is lost
    if lost:
        with pytest.raises(HostsLostError, match="node0:29500, where the hosts meet, does not answer"):
            meeting.check()
    network.answers["node0"] = Answer.accepted
    _looked(meeting)
    meeting.check()  # it is back


def test_an_endpoint_without_ranks_is_no_lost_host() -> None:
    """Training does not need it; only the next meeting does."""
    meeting, handler, network = _met(TWO)
    meeting._endpoint_node = repr(THREE)
    network.answers["node0"] = Answer.refused
    handler.silent(20)
    assert _looked(meeting) == ""


def test_errors_of_a_meeting_are_sentences() -> None:
    """What torch raises has no place and no limit."""
    meeting, handler, _ = _met(TWO)
    handler.fails = RendezvousConnectionError("C++ frames")
    with pytest.raises(HostsLostError, match=r"^node0:29500, where the hosts meet"):
        meeting.next_rendezvous()
    handler.fails = RendezvousTimeoutError()
    handler.state.complete, handler.state.participants = False, {TWO: 0}
    with pytest.raises(HostsLostError, match=r"^1 of 2 hosts has not come to node0:29500 within 40 s\.$"):
        meeting.next_rendezvous()


def test_waits_have_a_place_a_clock_and_a_limit() -> None:
    """Nothing is said while nobody is waited for; a spare has no limit."""
    meeting, handler, _ = _met(TWO)
    assert meeting.wait_text() == ""
    meeting._began_at = time.monotonic() - 12
    handler.state.complete, handler.state.participants = False, {}
    assert meeting.wait_text() == "waiting for 1 of 2 hosts at node0:29500, 12 s of 40"
    handler.state.redundancy_list.add(TWO)
    handler.state.participants = {ONE: 0, THREE: 1}
    assert meeting.wait_text() == "waiting at node0:29500 as a spare: 2 hosts have ranks"
    meeting._handler = None
    assert meeting.wait_text() == "waiting for node0:29500 to answer, 12 s of 40"
