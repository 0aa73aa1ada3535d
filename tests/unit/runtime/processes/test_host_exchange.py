"""Hosts hear one another soon, and whatever the network does, nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from grpo_run.runtime.processes.host_exchange import FAULT, MAX_PAYLOAD_BYTES, HostExchange
from grpo_run.runtime.processes.meeting import Answer

HEARD_SECONDS = 10.0


def until(condition: Callable[[], object]) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + HEARD_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pair() -> Iterator[tuple[HostExchange, HostExchange]]:
    """Two hosts, the first of which serves the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    address = "127.0.0.1", store.port
    made = HostExchange(address, node=0, nodes=2, served=store), HostExchange(address, node=1, nodes=2)
    del store
    yield made
    for one in made:
        one.close()


def test_what_is_published_is_heard_and_confirmed(pair: tuple[HostExchange, HostExchange]) -> None:
    """In its newest form, with the name of the host; a payload that is too long is not told."""
    here, there = pair
    assert here.publish(FAULT, b"\x00first")
    until(lambda: there.latest(FAULT) == {0: b"\x00first"})
    assert here.publish(FAULT, b"second")
    until(lambda: there.latest(FAULT) == {0: b"second"})
    until(lambda: here.has_confirmed(1))
    assert there.latest("other") == {}
    assert not here.publish(FAULT, b"x" * (MAX_PAYLOAD_BYTES + 1))
    assert there.name_of(0) == here.name
    assert here.silent_seconds(1) < 20


def test_the_clock_grows_with_the_beats_of_all(pair: tuple[HostExchange, HostExchange]) -> None:
    """What one host reads after another is a later time."""
    here, there = pair
    until(lambda: here.clock.value and there.clock.value)
    before, beat = here.clock.value, there.beats
    until(lambda: there.clock.beat > beat)  # a beat that began after the reading
    assert there.clock.value > before


def test_a_host_whose_supervisor_is_gone_refuses(pair: tuple[HostExchange, HostExchange]) -> None:
    """One that is there accepts; one that was never heard is silent."""
    here, there = pair
    until(lambda: here.silent_seconds(1) < 0.2 and here.clock.value)
    until(lambda: here.look_for([1]) == {1: Answer.accepted})
    there.close()
    until(lambda: here.look_for([1]) == {1: Answer.refused})
    assert here.look_for([7]) == {7: Answer.silent}


def test_nobody_waits_for_a_store_that_is_gone(pair: tuple[HostExchange, HostExchange]) -> None:
    """What was heard stays known, and the age of it grows."""
    here, there = pair
    here.publish(FAULT, b"last words")
    until(lambda: there.latest(FAULT))
    here.close()
    until(lambda: there.silent_seconds(0) > 0.6)
    began = time.monotonic()
    assert there.publish(FAULT, b"nobody hears it")
    there.wait(0.05)
    assert there.latest(FAULT) == {0: b"last words"}
    assert time.monotonic() - began < 20
