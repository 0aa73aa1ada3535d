"""Polling the ranks' collectives for the metrics: never in the way of who reads them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping

import pytest

from grpo_run.runtime.supervisor.detection import _collective_records as collective_records
from grpo_run.runtime.supervisor.detection._collective_progress import (
    OLD_SECONDS,
    POLL_SECONDS,
    CollectiveProgressPoller,
)
from grpo_run.runtime.supervisor.detection._collective_records import MAX_UNANSWERED

LONG_SECONDS = 20.0
ABSENT = "answered b'HTTP/1.1 404 Not Found'"


def answer(*entries: tuple[str, int, bool]) -> bytes:
    """A recorder's answer with entries of (group, sequence, completed)."""
    return json.dumps({
        "version": "2.10",
        "entries": [
            {
                "process_group": [group, ""], "pg_id": int(group), "collective_seq_id": sequence,
                "profiling_name": "gloo:all_reduce", "retired": completed,
            }
            for group, sequence, completed in entries
        ],
    }).encode()  # fmt: skip


class Ranks:
    """Two ranks whose recorders answer with what a test sets; the clock is the test's too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.sockets_asked: Counter[str] = Counter()
        self.sockets = {0: "first/0", 1: "first/1"}
        self.now = 100.0
        self.may_answer = threading.Event()
        self.may_answer.set()
        monkeypatch.setattr(collective_records, "fetch", self.fetch)
        self.poller = CollectiveProgressPoller(lambda: self.now)

    def fetch(
        self, sockets: Mapping[int, str], seconds: float, handler: str
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """As `_collective_records.fetch`."""
        assert self.may_answer.wait(LONG_SECONDS)
        self.asked.append(handler)
        if "nccl" in handler:
            return {}, dict.fromkeys(sockets, ABSENT)
        self.sockets_asked.update(sockets.values())
        found = {rank: self.answers[path] for rank, path in sockets.items() if path in self.answers}
        return found, dict.fromkeys(sockets.keys() - found.keys(), "no answer within 0.5 s")

    def poll(self) -> Mapping[int, Mapping[str, tuple[int, int]]]:
        """Read, and read again once the poll that this has started is over."""
        self.now += POLL_SECONDS
        self.poller.latest(self.sockets)
        for thread in threading.enumerate():
            if thread.name == "grpo-run-collectives":
                thread.join(LONG_SECONDS)
        return self.poller.latest(self.sockets)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Ranks that answer."""
    return Ranks(monkeypatch)


def test_each_rank_and_group_has_its_last_numbers(ranks: Ranks) -> None:
    """A group whose entries have left the ring keeps its numbers, and none goes back. A rank that does not
    answer is absent.
    """
    ranks.answers = {"first/0": answer(("0", 1, True), ("1", 4, True), ("0", 2, False))}
    assert ranks.poll() == {0: {"0": (2, 1), "1": (4, 4)}}
    ranks.answers = {"first/0": answer(("0", 3, False), ("0", 4, True)), "first/1": answer(("0", 2, True))}
    assert ranks.poll() == {0: {"0": (4, 4), "1": (4, 4)}, 1: {"0": (2, 2)}}
    ranks.answers = {"first/1": b"{"}
    assert ranks.poll() == {}


def test_a_new_attempt_begins_without_numbers(ranks: Ranks) -> None:
    """Its ranks count from 1."""
    ranks.answers = dict.fromkeys(("first/0", "first/1"), answer(("0", 9, True)))
    assert ranks.poll().keys() == {0, 1}
    ranks.sockets = {0: "second/0", 1: "second/1"}
    ranks.answers = {"second/0": answer(("0", 1, False))}
    assert ranks.poller.latest(ranks.sockets) == {}
    assert ranks.poll() == {0: {"0": (1, 0)}}
    ranks.sockets = {}
    assert ranks.poll() == {}


def test_what_the_recorder_no_longer_shows_as_completed_is_absent(ranks: Ranks) -> None:
    """256 collectives in flight: how many of the earlier ones have completed is not known."""
    ranks.answers = {"first/0": answer(("0", 300, False), ("0", 301, False))}
    assert ranks.poll() == {0: {}}


def test_who_reads_waits_for_no_rank(ranks: Ranks) -> None:
    """One poll at a time, and no more often than the interval; a missing handler is asked for once."""
    ranks.answers = {"first/0": answer(("0", 1, True))}
    ranks.may_answer.clear()
    began = time.monotonic()
    for _ in range(5):
        ranks.now += POLL_SECONDS
        assert ranks.poller.latest(ranks.sockets) == {}
    assert time.monotonic() - began < LONG_SECONDS
    ranks.may_answer.set()
    ranks.poll()
    ranks.poll()
    assert sum("nccl" in handler for handler in ranks.asked) == 1
    polls = len(ranks.asked)
    ranks.now += POLL_SECONDS / 2
    ranks.poller.latest(ranks.sockets)
    assert len(ranks.asked) == polls


def test_a_stuck_rank_is_asked_three_times_in_a_row(ranks: Ranks) -> None:
    """Each request occupies a thread of its worker server, which is needed for the evidence."""
    for _ in range(MAX_UNANSWERED - 1):
        ranks.poll()
    ranks.answers = {"first/1": answer(("0", 1, True))}
    ranks.poll()
    ranks.answers.clear()
    for _ in range(2 * MAX_UNANSWERED):
        ranks.poll()
    assert ranks.sockets_asked["first/1"] == 2 * MAX_UNANSWERED


def test_an_old_result_is_not_shown(ranks: Ranks) -> None:
    """The next reading after hours without one."""
    ranks.answers = {"first/0": answer(("0", 1, True))}
    assert ranks.poll() == {0: {"0": (1, 1)}}
    ranks.may_answer.clear()
    ranks.now += OLD_SECONDS + 1
    assert ranks.poller.latest(ranks.sockets) == {}
    ranks.may_answer.set()
