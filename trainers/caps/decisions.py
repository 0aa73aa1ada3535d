"""Record what the deadline did to each rollout, so that a rollout repeated after a fault ends after the same token.

A deadline depends on the clock, and a step that is done again would otherwise end in other weights. Each rank journals its
rollouts while `max_time` is set (`hooks/rollouts.py`), and reads them when a `train()` call begins. On another
number of ranks, rollouts are others, and nothing is reapplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.record.journal import read_newest

EVENT = "rollout_ended"
MAX_READ_BYTES = 64 << 20
"""At most the end of a journal is read: the rollouts of some hundred thousand steps. A fault repeats a few."""


class RolloutKey(NamedTuple):
    """Which rollout of a rank."""

    train_call: int
    step: int
    """Optimizer steps done before it."""
    mode: str
    """`train` or `eval`."""
    number: int
    """Among those of this step and mode, from 0."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the deadline did to a rollout.

    Args:
        steps: decoding steps of the rollout, over all turns.
        timed_out_after: decoding steps after which it was ended; None if it ended itself.
    """

    steps: int
    timed_out_after: int | None

    def over(self, steps: int) -> bool | None:
        """Return whether the rollout is over after so many steps; None where it has become another one.

        A rollout that once ended itself and now goes on longer is another one: it was sampled with other seeds.
        """
        if self.timed_out_after is not None:
            return steps >= self.timed_out_after
        return False if steps <= self.steps else None


def read_decisions(journal: Path, rank: int, world_size: int) -> dict[RolloutKey, Decision]:
    """Return this rank's decisions from the run's journal; the newest of each rollout. A missing file has none."""
    found: dict[RolloutKey, Decision] = {}
    for record in read_newest(journal, EVENT, MAX_READ_BYTES):
        if (record.get("rank"), record.get("world_size")) != (rank, world_size):
            continue
        try:
            key = RolloutKey(
                int(record["train_call"]), int(record["step"]), str(record["mode"]), int(record["number"])
            )
            after = record["timed_out_after"]
            found[key] = Decision(
                steps=int(record["decoding_steps"]), timed_out_after=None if after is None else int(after)
            )
        except (ValueError, KeyError, TypeError):
            continue  # of another version
    return found
