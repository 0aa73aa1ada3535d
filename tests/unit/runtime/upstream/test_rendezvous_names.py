"""torch's rendezvous handler keeps what it has read last where it is looked for."""

from __future__ import annotations

import threading
import time

import pytest
from support.runs import free_port
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous, registry

from grpo_run.runtime.upstream import rendezvous_names


@pytest.fixture(autouse=True)
def _events_without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names the caller in each event, which takes a second where transformers is imported: it looks
    through all modules, twice for each frame of the stack.
    """
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda: "test")


def test_a_handler_that_has_met_shows_its_members() -> None:
    """Its host is the only participant, with rank 0, and was read a moment ago."""
    parameters = RendezvousParameters("c10d", "localhost:0", "alone", 1, 1, local_addr="localhost")
    handler = registry.get_rendezvous_handler(parameters)
    handler.next_rendezvous()
    seen = rendezvous_names.view(handler)
    assert seen.participants == {rendezvous_names.this_node(handler): 0}
    assert (seen.complete, seen.is_spare, seen.waiting) == (True, False, frozenset())
    assert rendezvous_names.this_node(handler).addr == "localhost"
    assert 0 <= time.monotonic() - seen.read_at < 60
    assert (seen.lost, seen.ended, list(seen.beats)) == ({}, None, [rendezvous_names.this_node(handler)])
    rendezvous_names.store(handler).set("key", "value")
    assert any("RendezvousKeepAlive" in one.name for one in threading.enumerate())
    rendezvous_names.stop_beats(handler)
    assert not any("RendezvousKeepAlive" in one.name for one in threading.enumerate())
    handler.shutdown()


@pytest.mark.full
def test_what_is_written_into_the_state_reaches_all_hosts() -> None:
    """torch drops a host that is declared lost at once, and keeps what it does not know when it writes."""
    parameters = RendezvousParameters(
        "c10d", f"localhost:{free_port()}", "pair", 2, 2, local_addr="localhost", keep_alive_interval=1
    )
    rendezvous_names.name_uniquely()
    first = registry.get_rendezvous_handler(parameters)
    rendezvous_names.name_uniquely()
    second = registry.get_rendezvous_handler(parameters)
    names = [rendezvous_names.this_node(handler) for handler in (first, second)]
    assert abs(names[0].local_id - names[1].local_id) > 1
    assert names[0].pid == names[1].pid
    joining = threading.Thread(target=second.next_rendezvous)
    joining.start()
    first.next_rendezvous()
    joining.join(30)
    lost = rendezvous_names.this_node(second)
    place = rendezvous_names.endpoint(parameters)
    backend = rendezvous_names.connect(place, "pair")
    assert not rendezvous_names.refuse(rendezvous_names.connect(place, "another"), "there", "why")
    assert rendezvous_names.refuse(backend, "there", "why it has not come")
    rendezvous_names.note(backend, rendezvous_names.APART, lost, "stays out")
    rendezvous_names.note(backend, rendezvous_names.APART, names[0], "stays out")
    rendezvous_names.note(backend, rendezvous_names.REFUSED, "elsewhere", "why")
    rendezvous_names.note(backend, rendezvous_names.REFUSED, "elsewhere")
    rendezvous_names.declare_lost(backend, lost, "why", 2)
    rendezvous_names.end(backend, names[0], 93, "it gave up")
    rendezvous_names.end(rendezvous_names.connect(place, "pair"), lost, 2, "later")
    deadline = time.monotonic() + 20
    seen = rendezvous_names.view(first)
    while lost in seen.participants and time.monotonic() < deadline:  # until its keep-alive reads it
        time.sleep(0.1)
        seen = rendezvous_names.view(first)
    time.sleep(2.5)  # until it has been written again
    for handler in (first, second):
        seen = rendezvous_names.read_now(handler, backend)
        assert lost not in seen.participants
        assert seen.lost == {lost: "why"}
        assert (seen.refused, seen.in_a_row) == ({"there": "why it has not come"}, {"localhost": 2})
        assert seen.apart == {names[0]: "stays out"}
        assert not seen.closes_soon
        assert seen.ended is not None
        assert (seen.ended.exit_code, seen.ended.sentence) == (93, "it gave up")
        assert seen.ended.known_by == {lost, rendezvous_names.this_node(first)}
    rendezvous_names.require(first, 3)
    assert first._op_executor._settings.min_nodes == first._state_holder._settings.min_nodes == 3
    first.shutdown()


def test_the_endpoint_is_served_where_it_is() -> None:
    """Unless the user says who serves it."""
    here = RendezvousParameters("c10d", "localhost:1234", "pair", 2, 2)
    assert rendezvous_names.endpoint(here) == ("localhost", 1234)
    assert rendezvous_names.serves(here)
    assert not rendezvous_names.serves(
        RendezvousParameters("c10d", "localhost", "pair", 2, 2, is_host="false")
    )
