"""Deadlocks among the ranks of several hosts: what each of them has recorded, joined as of one moment.

Hosts read their ranks at different moments. The proof takes records that were the same in two polls of each
host, if the span between the two polls is shared by all: then there was a moment at which all of them held,
and a deadlock never ends by itself. Moments are compared by the exchange's clock, which is read after the
first of the polls has ended, and before the last one began. Every host joins and proves for itself, and all
of them see the same. A host that is not heard, or has a rank that moves, has told nothing: then nothing is
proved. Used by `_deadlock_detector.py`; `watchdog/deadlocks/proof.py` is the proof.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.runtime.history.host_status import HEARD_SECONDS
from grpo_run.runtime.processes.host_exchange import HostExchange
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.json_values import pack, unpack

RECORDS, MARK = "records", "mark"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """For how long a host's records have been the same.

    `first` is a time after the first poll that saw them had ended, `last` one before the last such poll
    began; `pending` describes the collectives that its ranks have enqueued and not completed.
    """

    first: int
    last: int
    pending: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records that belong to a mark with the same `first`."""

    first: int
    positions: Mapping[int, Position]


def share_a_moment(marks: Mapping[int, Mark]) -> bool:
    """Whether there was a moment at which the records of all hosts held."""
    return max(mark.first for mark in marks.values()) <= min(mark.last for mark in marks.values())


def are_in_one_place(marks: Mapping[int, Mark]) -> bool:
    """Whether all ranks of all hosts are in one and the same collective, which then can only be slow."""
    places = {mark.pending for mark in marks.values()}
    return len(places) == 1 and len(next(iter(places))) == 1


class JointRecords:
    """Joins the records of one attempt."""

    def __init__(self, exchange: HostExchange, world_size: int) -> None:
        self._exchange = exchange
        self._world_size = world_size
        self._key: object = None
        self._first: int | None = None
        self._first_beat = 0
        self._own: Mark | None = None
        self._refuted: dict[int, int] = {}
        """The marks' `first` by host of records that have proved nothing."""

    @property
    def is_due(self) -> bool:
        """Whether another poll of this host may be what a proof lacks."""
        if self._own is None:
            heard = self._first is not None or self._exchange.clock.beat > self._first_beat
            return self._key is not None and heard
        marks = self._suspicious(self._own)
        lacks = any(self._own.last < mark.first for mark in marks.values())
        return lacks or (bool(marks) and share_a_moment(marks))

    @property
    def time(self) -> int:
        """A time of the exchange's clock that has passed; to be read before a poll."""
        return self._exchange.clock.value

    def withdraw(self) -> None:
        """A rank of this host has moved."""
        self._key = self._first = None
        if self._own is not None:
            self._own = None
            self._exchange.publish(MARK, b"")

    def prove(self, key: object, positions: Mapping[int, Position], began_at: int) -> Deadlock | None:
        """Tell the other hosts what a poll saw, and return what is proved with what they have told.

        Args:
            key: of all that the poll saw: equal for two polls that saw the same.
            positions: of the ranks of this host.
            began_at: `time` before the poll.
        """
        if key != self._key:
            self.withdraw()
            self._key, self._first_beat = key, self._exchange.beats
        clock = self._exchange.clock
        if self._first is None and clock.beat > self._first_beat:  # read after the first poll had ended
            self._first = clock.value
            self._exchange.publish(RECORDS, pack(Records(first=clock.value, positions=positions)))
        if self._first is None or began_at < self._first:
            return None
        records = [one for position in positions.values() for one in position.records or ()]
        pending = {
            f"{one.group} {one.sequence} {one.operation} {one.sizes} {one.dtypes}"
            for one in records
            if not one.completed
        }
        self._own = own = Mark(first=self._first, last=began_at, pending=tuple(sorted(pending)))
        self._exchange.publish(MARK, pack(own))
        marks = self._suspicious(own)
        return self._judge(marks, positions) if marks and share_a_moment(marks) else None

    def _suspicious(self, own: Mark) -> dict[int, Mark]:
        """The marks of all hosts, if these are heard and may be in a deadlock; else none."""
        found = {self._exchange.node: own}
        for node, packed in self._exchange.latest(MARK).items():
            if packed and self._exchange.silent_seconds(node) < HEARD_SECONDS:
                with contextlib.suppress(ValueError):  # of another version
                    found[node] = unpack(Mark, packed)
        cleared = are_in_one_place(found) or _firsts(found) == self._refuted
        return {} if cleared or len(found) < self._exchange.nodes else found

    def _judge(self, marks: Mapping[int, Mark], positions: Mapping[int, Position]) -> Deadlock | None:
        joint, firsts = dict(positions), _firsts(marks)
        for node, packed in self._exchange.latest(RECORDS).items():
            with contextlib.suppress(ValueError):
                told = unpack(Records, packed)
                if told.first != firsts[node]:
                    return None
                joint |= told.positions
        deadlock = prove(joint, world_size=self._world_size) if len(joint) == self._world_size else None
        if deadlock is None:
            self._refuted = firsts
        return deadlock


def _firsts(marks: Mapping[int, Mark]) -> dict[int, int]:
    return {node: mark.first for node, mark in marks.items()}
