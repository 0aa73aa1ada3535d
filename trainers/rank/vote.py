"""The content of a step vote: what one rank sends, what all ranks receive, and how it is encoded.

Each rank encodes its `Vote` as a vector of integers. An all-reduce by MAX over these vectors shows whether
all ranks finished the same step with the same phases (maximum and minimum must agree) and combines their
flags by logical OR. Pure data; `vote_group.py` does the communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_run.runtime.errors import ConsensusError


class Flags(NamedTuple):
    """The flags of a vote. A field added here is encoded, reduced, decoded and combined with the others."""

    stop: bool = False
    """Stop after the next step, with a checkpoint."""
    save: bool = False
    """Save a checkpoint after the next step."""
    snapshot: bool = False
    """Take a snapshot in memory after the next step."""
    nonfinite: bool = False
    """A loss or the gradient of this step was not finite."""
    tripped: bool = False
    """A learning guard whose response ends the attempt has tripped at this step."""

    timed_out: bool = False
    """A deadline has ended a rollout of this step."""
    collect: bool = False
    """Collect garbage after the next step: a rank's memory has grown."""
    release: bool = False
    """Return cached device memory after the next step: a rank needs it."""

    def union(self, other: Flags) -> Flags:
        """Return the flags that are set in either."""
        return Flags(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One rank's vote on an optimizer step that it has finished.

    Args:
        fingerprint: of the phases entered since the vote before.
    """

    step: int
    fingerprint: int = 0
    flags: Flags = field(default_factory=Flags)

    def encode(self) -> list[int]:
        """Return the vector to reduce by MAX. A value and its negation together yield maximum and minimum."""
        return [self.step, -self.step, self.fingerprint, -self.fingerprint, *map(int, self.flags)]


@dataclass(frozen=True, kw_only=True, slots=True)
class VoteResult:
    """The result of a vote, equal on every rank: the step, and each flag that any rank set."""

    step: int
    flags: Flags


def decode(vector: list[int]) -> VoteResult:
    """Decode a reduced vector.

    Raises:
        ConsensusError: ranks voted on different steps, or entered different phases.
    """
    last_step, first_step, high, low = vector[0], -vector[1], vector[2], -vector[3]
    if last_step != first_step:
        raise ConsensusError(
            f"ranks voted on different steps: the lowest is {first_step}, the highest {last_step}"
        )
    if high != low:
        raise ConsensusError(
            f"ranks entered different phases in step {last_step} (fingerprints {high:#x} and {low:#x}):"
            " one rank evaluated, generated or saved where another did not"
        )
    return VoteResult(step=last_step, flags=Flags(*map(bool, vector[4:])))
