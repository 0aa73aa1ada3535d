"""Which host is lost, what is said of those that are waited for, and which end is the end of all."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
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
from grpo_run.runtime.processes.meeting import Meeting
from grpo_run.runtime.processes.signs_of_life import SILENT_SECONDS, Answer
from grpo_run.runtime.upstream import rendezvous_names


@dataclass(frozen=True, order=True)
class Node:
    """A host, as torch describes it."""

    addr: str
    pid: int = 1


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
        keys = {"grpo_run/endpoint": repr(ONE).encode()}
        keys |= {f"grpo_run/alive/{one!r}": f"{one.addr} 7".encode() for one in (TWO, THREE)}
        self._store = SimpleNamespace(check=lambda names: names[0] in keys, get=keys.__getitem__)
        self._state_holder = SimpleNamespace(
            state=SimpleNamespace(
                participants={ONE: 0, TWO: 1}, wait_list=set(), redundancy_list=set(), complete=True,
                last_heartbeats={ONE: 0, TWO: 0}, deadline=None,
            ),
            _last_sync_time=time.monotonic(),
            _backend=self,
        )  # fmt: skip
        self.fails: Exception | None = None
        self.written = self.state

    @property
    def state(self) -> Any:
        return self._state_holder.state

    def get_state(self) -> tuple[bytes, bytes]:
        return pickle.dumps(self.written), b""

    def set_state(self, state: bytes, token: bytes) -> tuple[bytes, bytes, bool]:
        self.written = pickle.loads(state)
        return state, b"", True

    def _stop_heartbeats(self) -> None:
        """None has begun."""

    def is_closed(self) -> bool:
        """Read what was written."""
        self._state_holder.state = self.written
        return False

    def next_rendezvous(self) -> None:
        if self.fails is not None:
            raise self.fails


def _met(node: Node) -> tuple[Meeting, Handler, Network]:
    """Return the meeting of a host that has been looked at once; `node0` serves the endpoint."""
    network, handler = Network(), Handler(node)
    parameters = RendezvousParameters(
        "c10d", "node0:29500", "pair", 2, 2, is_host=str(node == ONE), join_timeout="40"
    )
    meeting = Meeting(parameters, ask=network)
    meeting._handler = meeting._backend = handler
    meeting.next_rendezvous()
    meeting.look()
    return meeting, handler, network


def test_the_host_of_the_endpoint_looks_at_all_and_the_others_at_it() -> None:
    """And nobody is lost while all answer."""
    for node, asked in ((ONE, "node1"), (TWO, "node0")):
        meeting, _, network = _met(node)
        meeting.look()
        assert meeting.lost == ""
        assert set(network.asked) == {asked}


def test_a_host_whose_port_is_closed_is_lost_on_all_hosts() -> None:
    """torch drops it, and every host knows why, until the hosts meet again."""
    meeting, handler, network = _met(ONE)
    network.answers["node1"] = Answer.refused
    meeting.look()
    assert meeting.lost == "Host node1 is lost: its supervisor has ended."
    assert handler.written.last_heartbeats[TWO] == rendezvous_names.LONG_AGO

    other, there, _ = _met(THREE)
    there._state_holder.state = handler.written
    other.look()
    assert other.lost == ""  # torch has not dropped it yet
    del handler.written.participants[TWO]
    other.look()
    assert other.lost == meeting.lost
    other.next_rendezvous()
    assert other.lost == ""


def test_a_host_that_is_declared_lost_while_the_hosts_meet_is_lost_to_the_attempt() -> None:
    """The look that declared it did not know that it is a member; by the next one torch has dropped it."""
    meeting, handler, network = _met(ONE)
    members, meeting._members = meeting._members, {}
    network.answers["node1"] = Answer.refused
    meeting.look()
    assert meeting.lost == ""
    meeting._members = members
    del handler.written.participants[TWO], handler.written.last_heartbeats[TWO]
    handler.is_closed()
    meeting.look()
    assert meeting.lost == "Host node1 is lost: its supervisor has ended."


def test_a_silent_host_is_lost_only_if_its_connection_has_waited_long() -> None:
    """A spare that waits takes no place of a host that was cut off for some seconds."""
    meeting, handler, network = _met(ONE)
    network.answers["node1"] = Answer.silent
    handler.state.redundancy_list.add(THREE)
    for _ in range(3):
        meeting.look()
    assert meeting.lost == ""
    assert handler.written.last_heartbeats[TWO] == 0
    meeting._signs[TWO]._answered_at -= SILENT_SECONDS
    meeting._signs[TWO]._beat_at -= SILENT_SECONDS
    meeting.look()
    assert meeting.lost == "Host node1 is lost: it has not answered for 9 s."


def test_a_host_that_waits_and_vanishes_is_dropped_and_not_lost() -> None:
    """It has no ranks."""
    meeting, handler, network = _met(ONE)
    handler.state.redundancy_list.add(THREE)
    handler.state.last_heartbeats[THREE] = 0
    meeting.look()
    network.answers["node2"] = Answer.refused
    meeting.look()
    assert meeting.lost == ""
    assert handler.written.last_heartbeats[THREE] == rendezvous_names.LONG_AGO


@pytest.mark.parametrize("answer", [Answer.accepted, Answer.silent])
def test_a_dropped_host_is_not_lost_while_it_may_answer(answer: Answer) -> None:
    """It was cut off, or its supervisor is slow; what was sent to it is still under way."""
    meeting, handler, network = _met(ONE)
    del handler.state.participants[TWO]
    network.answers["node1"] = answer
    for _ in range(5):
        meeting.look()
    assert meeting.lost == ""
    handler.state.wait_list.add(THREE)
    assert meeting.num_nodes_waiting() == 0


def test_a_host_that_leaves_to_meet_again_is_a_change_of_members() -> None:
    """It is no participant for a moment, then it waits."""
    meeting, handler, _ = _met(ONE)
    del handler.state.participants[TWO]
    meeting.look()
    handler.state.wait_list.add(TWO)
    meeting.look()
    assert meeting.lost == ""
    assert meeting.num_nodes_waiting() == 1


def test_a_closed_endpoint_is_lost_until_it_answers() -> None:
    """The waits of this host end."""
    meeting, _, network = _met(TWO)
    network.answers["node0"] = Answer.refused
    meeting.look()
    assert meeting.lost.startswith("node0:29500, where the hosts meet, does not answer any more")
    with pytest.raises(HostsLostError, match="node0:29500, where the hosts meet, does not answer"):
        meeting.check()
    network.answers["node0"] = Answer.accepted
    meeting.look()
    meeting.check()


def test_a_host_that_gives_up_ends_the_others_with_its_code() -> None:
    """The host of the endpoint leaves when they have read it. Other ends are nobody else's."""
    meeting, handler, _ = _met(ONE)
    meeting.leave(75, "Stopped.")
    assert rendezvous_names.view(handler).ended is None
    handler.written.last_heartbeats = {ONE: 0}
    meeting.leave(93, "Gave up: why.")
    other, there, _ = _met(TWO)
    there.written = there._state_holder.state = handler.written
    with pytest.raises(HostsLostError, match=r"^Host node0 gave up: Gave up: why\.$") as raised:
        other.check()
    assert raised.value.exit_code == 93
    other.look()
    assert there.written.grpo_run_ended[2] == {ONE, TWO}
    other.leave(93, str(raised.value))
    assert there.written.grpo_run_ended[:2] == (93, "Host node0 gave up: Gave up: why.")


def test_an_endpoint_without_ranks_is_no_lost_host() -> None:
    """Training does not need it; only the next meeting does."""
    meeting, _, network = _met(TWO)
    meeting._endpoint_node = repr(THREE)
    network.answers["node0"] = Answer.refused
    meeting.look()
    assert meeting.lost == ""


@pytest.mark.parametrize("supervised", [True, False])
def test_a_dropped_host_is_looked_at_by_all_where_only_a_store_serves_the_endpoint(supervised: bool) -> None:
    """No supervisor of that host declares it lost. Where there is one, only that one does."""
    meeting, handler, network = _met(THREE)
    meeting._endpoint_node = repr(ONE) if supervised else ""
    del handler.state.participants[TWO]
    for _ in range(2):
        meeting.look()
    assert meeting.lost == ""  # it answers
    network.answers["node1"] = Answer.refused
    for _ in range(2):
        meeting.look()
    assert meeting.lost == ("" if supervised else "Host node1 is lost: its supervisor has ended.")


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


def test_a_spare_is_told_that_the_run_has_finished() -> None:
    """It ends with 0; hosts with ranks finish by themselves, and nobody waits for them."""
    meeting, handler, _ = _met(ONE)
    handler.written.redundancy_list.add(THREE)
    handler.written.last_heartbeats[THREE] = 0
    telling = threading.Thread(target=meeting.leave, args=(0, "Finished."))
    telling.start()
    spare, there, _ = _met(THREE)
    deadline = time.monotonic() + 60
    while not hasattr(handler.written, "grpo_run_ended") and time.monotonic() < deadline:
        time.sleep(0.01)
    there.written = there._state_holder.state = handler.written
    with pytest.raises(HostsLostError, match="has finished the run") as raised:
        spare.check()
    assert raised.value.exit_code == 0
    spare.look()
    handler.written = there.written
    telling.join(60)
    assert not telling.is_alive()


def test_a_change_of_members_has_names() -> None:
    """A host with ranks starts them again, or another one joins."""
    meeting, handler, _ = _met(ONE)
    handler.state.wait_list.update({TWO, THREE})
    assert meeting.change_text() == "host node1 restarts its ranks and host node2 joins"


def _lose(meeting: Meeting, handler: Handler, network: Network, node: Node) -> None:
    """Let a host with ranks be lost, looked at again before torch has dropped it, and be replaced."""
    network.answers["node1"] = Answer.refused
    for _ in range(2):
        meeting.look()
    assert node in handler.written.grpo_run_lost
    network.answers["node1"] = Answer.accepted
    again = Node("node1", node.pid + 1)
    handler.written.participants, handler.written.last_heartbeats = {ONE: 0, again: 1}, {ONE: 0, again: 0}
    handler.is_closed()
    meeting._places[again] = ("node1", 7)
    meeting.next_rendezvous()
    meeting.look()


def test_a_host_that_was_lost_twice_waits_apart_until_it_is_needed() -> None:
    """All are told why; it joins by itself, and what is said of it is over."""
    meeting, handler, network = _met(ONE)
    for times in (1, 2):
        _lose(meeting, handler, network, Node("node1", times))
        assert handler.written.grpo_run_lost_in_a_row == {"node1": times}
    handler.written.participants = {ONE: 0, THREE: 1}

    back, there, _ = _met(THREE)
    there.written, there._this_node = handler.written, TWO
    joining = threading.Thread(target=back.next_rendezvous)
    joining.start()
    _until(lambda: hasattr(there.written, "grpo_run_apart"))
    there.is_closed()
    assert "lost 2 times in a row" in back.outside()["node1"]
    assert back.wait_text() == "waiting at node0:29500 until the others need it"
    assert joining.is_alive()
    there.written.participants = {ONE: 0}
    joining.join(60)
    assert not joining.is_alive()
    assert there.written.grpo_run_apart == {}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_user_lets_a_host_back() -> None:
    """It joins at once, and counts anew."""
    meeting, handler, _ = _met(TWO)
    handler.written.participants = {ONE: 0, THREE: 1}
    handler.written.grpo_run_lost_in_a_row = {"node1": 2}
    handler.written.grpo_run_refused = {"node1": "why"}
    meeting._parameters.config["readmit"] = "1"
    meeting.next_rendezvous()
    assert handler.written.grpo_run_lost_in_a_row == handler.written.grpo_run_refused == {}


def test_a_host_that_could_not_start_its_ranks_does_not_end_the_run() -> None:
    """The others go on without it, or wait, and say why."""
    meeting, handler, _ = _met(TWO)
    handler.written.last_heartbeats = {ONE: 0}
    meeting.leave(93, "No process could be started.", alone=True)
    assert rendezvous_names.read_now(handler, handler).ended is None
    other, there, _ = _met(ONE)
    there._state_holder.state = handler.written
    assert other.outside() == {"node1": "gave up: No process could be started"}
    other._began_at = time.monotonic()
    there.state.complete, there.state.participants = False, {ONE: 0}
    assert other.wait_text().endswith("0 s of 40; host node1 gave up: No process could be started")
