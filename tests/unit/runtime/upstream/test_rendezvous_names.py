"""torch's rendezvous handler keeps what it has read last where it is looked for."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from grpo_run.runtime.upstream import rendezvous_names


def test_a_handler_that_has_met_shows_its_members() -> None:
    """Its host is the only participant, with rank 0, and was read a moment ago."""
    parameters = RendezvousParameters("c10d", "localhost:0", "alone", 1, 1, local_addr="localhost")
    handler = registry.get_rendezvous_handler(parameters)
    handler.next_rendezvous()
    seen = rendezvous_names.view(handler)
    assert seen.participants == {rendezvous_names.this_node(handler): 0}
    assert (seen.complete, seen.is_spare, seen.waiting) == (True, False, frozenset())
    assert rendezvous_names.this_node(handler).addr == "localhost"
    assert 0 <= seen.age_seconds < 60
    rendezvous_names.store(handler).set("key", "value")
    handler.shutdown()


def test_the_endpoint_is_served_where_it_is() -> None:
    """Unless the user says who serves it."""
    here = RendezvousParameters("c10d", "localhost:1234", "pair", 2, 2)
    assert rendezvous_names.endpoint(here) == ("localhost", 1234)
    assert rendezvous_names.serves(here)
    assert not rendezvous_names.serves(
        RendezvousParameters("c10d", "localhost", "pair", 2, 2, is_host="false")
    )
