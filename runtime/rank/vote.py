"""The vote group: grpo-run's own group of all ranks for step votes and small collective decisions.

All ranks start a vote when their optimizer step is done and collect it before the next one, so
communication overlaps with work. A `Vote` is encoded as a vector of integers. An all-reduce by MAX shows
whether all ranks finished the same step with the same phases (maximum and minimum must agree), and combines
their flags by logical OR. `session.py` connects the groups.

Called by `runtime/rank/step/step_vote.py` (`start`, `collect`), by everything that decides collectively
(`maximum`, `gather`), and by `consensus.py`. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from grpo_run.runtime.errors import ConsensusError
from grpo_run.runtime.rank.transport import Detached, Finish, Operation, Transport


class Flags(NamedTuple):
    """The flags of a vote. A field added here is encoded, reduced, decoded and combined with the others."""

    stop: bool = False
    """Stop after the next step, with a checkpoint."""
    save: bool = False
    """Save a checkpoint after the next step."""
    snapshot: bool = False
    """Take a snapshot in memory after the next step."""
    alarm: bool = False
    """End the attempt now: something is wrong with this step."""
    collect: bool = False
    """Collect garbage after the next step: a rank's memory has grown."""
    release: bool = False
    """Return cached device memory after the next step: a rank needs it."""


class ControlRequests(NamedTuple):
    """What callbacks ask a trainer to do, by the field of transformers' `TrainerControl`."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


SetOfFlags = TypeVar("SetOfFlags", Flags, ControlRequests)


def encode_requests(requests: ControlRequests) -> list[int]:
    """Return the vector to reduce by MAX: a one is on some rank if the maximum is, a zero if that of the
    negations is.
    """
    return [*map(int, requests), *(-request for request in requests)]


def decode_requests(vector: list[int]) -> tuple[ControlRequests, ControlRequests]:
    """Return what was asked for on all ranks, and on some but not on all.

    A stop that not all ranks have asked for takes a checkpoint.
    """
    count = len(ControlRequests._fields)
    by_all = ControlRequests(*(negated < 0 for negated in vector[count : 2 * count]))
    by_any = map(bool, vector[:count])
    by_some = ControlRequests(*(one and not each for one, each in zip(by_any, by_all, strict=True)))
    return by_all, by_some._replace(should_save=by_some.should_save or by_some.should_training_stop)


def either(mine: SetOfFlags, theirs: SetOfFlags) -> SetOfFlags:
    """Return the flags that are set in either."""
    return type(mine)(*(one or other for one, other in zip(mine, theirs, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One rank's vote on an optimizer step that it has finished.

    Args:
        fingerprint: of the phases entered since the vote before.
        common: a number that should be the same on all ranks; 0 for none.
        requests: what callbacks ask for on this rank, after this step.
    """

    step: int
    fingerprint: int = 0
    common: int = 0
    flags: Flags = field(default_factory=Flags)
    requests: ControlRequests = field(default_factory=ControlRequests)

    def encode(self) -> list[int]:
        """Return the vector to reduce by MAX. A value and its negation together yield maximum and minimum."""
        numbers = (self.step, self.fingerprint, self.common)
        both = [one for number in numbers for one in (number, -number)]
        return [*both, *map(int, self.flags), *encode_requests(self.requests)]


@dataclass(frozen=True, kw_only=True, slots=True)
class VoteResult:
    """The result of a vote, equal on every rank: the step, and each flag that any rank set.

    What callbacks ask for on all ranks is done after the step itself, as under torchrun. What they ask for on
    some ranks only is done on all ranks after the next step.

    Attributes:
        common: the number that all ranks have given; None if they differ.
    """

    step: int
    flags: Flags
    common: int | None = 0
    asked_by_all: ControlRequests = field(default_factory=ControlRequests)
    asked_by_some: ControlRequests = field(default_factory=ControlRequests)


def decode(vector: list[int]) -> VoteResult:
    """Decode a reduced vector.

    Raises:
        ConsensusError: ranks voted on different steps, or entered different phases.
    """
    last_step, high, most = vector[0:6:2]
    first_step, low, least = (-one for one in vector[1:6:2])
    if last_step != first_step:
        raise ConsensusError(
            f"ranks voted on different steps: the lowest is {first_step}, the highest {last_step}"
        )
    if high != low:
        raise ConsensusError(
            f"ranks entered different phases in step {last_step} (fingerprints {high:#x} and {low:#x}):"
            " one rank evaluated, generated or saved where another did not"
        )
    flags, requests = vector[6 : 6 + len(Flags._fields)], vector[6 + len(Flags._fields) :]
    by_all, by_some = decode_requests(requests)
    return VoteResult(
        step=last_step,
        flags=Flags(*map(bool, flags)),
        common=most if most == least else None,
        asked_by_all=by_all,
        asked_by_some=by_some,
    )


def to_bits(seconds: float) -> int:
    """Return an integer that ranks can vote on; `from_bits` returns the same number of seconds."""
    return int(struct.unpack("<q", struct.pack("<d", seconds))[0])


def from_bits(bits: int) -> float:
    """Return the number of `to_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


class VoteGroup:
    """A group of all ranks and the vote in progress. One per rank; not thread-safe.

    Args:
        transport: connects the ranks; None for the only rank of a run.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self.wait_seconds = 0.0
        """Time this rank has waited in `collect`."""
        self.votes = 0
        """Number of votes collected."""
        self._transport = transport
        self._pending: Finish | None = None

    def start(self, vote: Vote) -> None:
        """Start a vote and return at once. The previous vote must have been collected."""
        assert self._pending is None, "a vote is in progress"
        self._pending = self._start(Operation.maxima, vote.encode())

    def collect(self) -> VoteResult | None:
        """Wait for the vote in progress and return its result; None if there is none.

        Raises:
            ConsensusError: ranks disagree.
            RuntimeError: a peer is gone or the vote timed out.
        """
        if self._pending is None:
            return None
        finish, self._pending = self._pending, None
        began = time.perf_counter()
        rows = finish()
        if self._transport is not None:
            self.wait_seconds += time.perf_counter() - began
        self.votes += 1
        return decode(_maxima(rows))

    def requests(self, requests: ControlRequests) -> tuple[ControlRequests, ControlRequests]:
        """Return what was asked for on all ranks, and on some; see `decode_requests`. Collective and
        blocking.
        """
        return decode_requests(self.maxima(encode_requests(requests)))

    def maximum(self, value: int) -> int:
        """Return the largest `value` of all ranks. Collective and blocking."""
        return self.maxima([value])[0]

    def maxima(self, values: list[int]) -> list[int]:
        """Return the largest value of all ranks at each position. Collective and blocking.

        Args:
            values: as many on every rank, each below 2**63.
        """
        return _maxima(self._all(Operation.maxima, values))

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return every rank's values, ordered by rank. Collective and blocking.

        Args:
            values: as many on every rank, each below 2**63.
        """
        return self._all(Operation.rows, values)

    def detach(self) -> None:
        """In a process that was forked from the rank: take part in nothing from now on."""
        if self._transport is not None:
            self._transport = Detached()

    def close(self) -> None:
        """Release the transport. No vote may be in progress on any rank."""
        if self._transport is not None:
            self._transport.close()

    def _all(self, operation: Operation, values: list[int]) -> list[list[int]]:
        assert self._pending is None, "collect the vote first: a collective in between would break its order"
        most = self._transport.most_values if self._transport is not None else len(values)
        rows = self._start(operation, values[:most])()
        for begin in range(most, len(values), most):
            more = self._start(operation, values[begin : begin + most])()
            rows = [row + part for row, part in zip(rows, more, strict=True)]
        return rows

    def _start(self, operation: Operation, values: list[int]) -> Finish:
        if self._transport is None:
            return lambda: [values]
        return self._transport.start(operation, values)


def _maxima(rows: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*rows, strict=True)]
