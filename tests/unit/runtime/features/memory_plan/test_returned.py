"""Memory of GPUs that is waited for before the next attempt."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from grpo_run.runtime.features.memory_plan import _returned as returned
from grpo_run.runtime.features.memory_plan._returned import ReturnedMemory, visible_gpus

GIB = 1 << 30


class Node:
    """GPUs whose memory in use follows a script, one reading after the other; the last one stays."""

    def __init__(self, *readings: list[int]) -> None:
        self.readings = list(readings)
        self.seconds = 0.0
        self.first_is_read = threading.Event()

    def read(self) -> Mapping[str, Any]:
        used = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        self.first_is_read.set()
        return {"devices": [{"index": index, "used_bytes": size} for index, size in enumerate(used)]}

    def watch(self, visible: frozenset[int] | None = None) -> ReturnedMemory:
        watch = ReturnedMemory(read=self.read, visible=visible, clock=lambda: self.seconds, sleep=self.sleep)
        watch.begin()
        self.first_is_read.wait(10)
        return watch

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_the_next_attempt_waits_until_a_killed_process_has_given_its_memory_back() -> None:
    node = Node([0], [70 * GIB], [70 * GIB], [40 * GIB], [0])
    assert node.watch().wait() == ""
    assert 0 < node.seconds < returned.RETURN_SECONDS
    assert node.readings == [[0]], "it has waited for the last reading"


def test_memory_that_never_comes_back_is_reported_with_its_size_and_waited_for_no_longer() -> None:
    node = Node([GIB, 0], [GIB, 12 * GIB])
    sentence = node.watch().wait()
    assert "12.0 GiB of GPU 1" in sentence
    assert "GPU 0" not in sentence
    assert node.seconds == pytest.approx(returned.RETURN_SECONDS, abs=1)


def test_memory_that_others_had_before_is_not_waited_for() -> None:
    node = Node([30 * GIB], [30 * GIB])
    assert node.watch().wait() == ""
    assert node.seconds == 0


def test_gpus_that_the_ranks_do_not_see_are_not_waited_for() -> None:
    node = Node([0, 0], [0, 50 * GIB])
    assert node.watch(frozenset({0})).wait() == ""


def test_a_node_without_gpus_or_with_a_driver_that_fails_waits_for_nothing() -> None:
    for answer in ({"devices": []}, {"error": "Unknown Error"}):
        watch = ReturnedMemory(read=lambda answer=answer: answer)  # type: ignore[misc]
        watch.begin()
        assert watch.wait() == ""


def test_a_driver_that_hangs_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returned, "READ_SECONDS", 0.05)
    release = threading.Event()
    watch = ReturnedMemory(read=lambda: {"devices": []} if release.wait(30) else {})
    watch.begin()
    assert watch.wait() == ""
    release.set()


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [(None, None), ("0,2", {0, 2}), ("", set()), ("GPU-1f", None), ("MIG-3", None), ("0, 1", {0, 1})],
)
def test_visible_gpus_are_read_from_indexes_only(variable: str | None, gpus: set[int] | None) -> None:
    assert visible_gpus(variable) == gpus
