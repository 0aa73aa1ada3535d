"""Which samples of a rollout are excluded, decided from the gathered rewards of all ranks.

Every rank has the same table, so every rank decides the same without a message. Called by `_masking.py`.
Pure: takes and returns numbers, imports neither torch nor TRL.

The rewards of a group are compared with one another, so a sample that lacks a reward the others have would be
compared with a zero in its place. That is why it leaves. A function that returned NaN for *all* samples of a
group is read as TRL reads it, as not applicable: nothing in the group is then compared with a zero, and
scripts exist that return NaN where the documentation says None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_run.runtime.features.masking.events import MaskingReason

RETURNED_NAN = math.inf
"""Stands for NaN in a function's column; TRL uses NaN itself for `None`."""


LEFT_OUT = "left out"
"""Stands for a reason that only the sample's rank knows."""


class Excluded(NamedTuple):
    """Why one sample is excluded.

    Args:
        reason: as far as the gathered table says: `failed` if it only says that a function failed.
        column: of the first reward function without a valid reward; None if that is not the reason.
    """

    reason: str
    column: int | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What leaves a rollout.

    Args:
        samples: the masked samples by their number in the rollout of all ranks.
        groups: numbers of the groups of which no sample is left.
        group_count: groups of the rollout.
        not_applicable: columns in which NaN of a whole group is read as None.
        none_valid: no sample has a valid reward, whatever the reason; one that is left out may have.
    """

    samples: Mapping[int, Excluded]
    groups: tuple[int, ...] = ()
    group_count: int = 0
    not_applicable: Collection[int] = ()
    none_valid: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no sample of the rollout is left."""
        return 0 < self.group_count == len(self.groups)


def select(
    rewards: Sequence[Sequence[float]], generations: int, models: Collection[int], left_out: Collection[int]
) -> Selection:
    """Decide which samples are excluded.

    Args:
        rewards: of all ranks, a row for each sample and a column for each function. NaN stands for None,
            `RETURNED_NAN` for NaN, minus infinity for a failure.
        generations: samples of a group.
        models: columns of reward models, which cannot return None.
        left_out: samples that are masked whatever their rewards are, such as those that were ended early.
    """
    samples: dict[int, Excluded] = {}
    empty: list[int] = []
    not_applicable: set[int] = set()
    group_count = len(rewards) // generations
    none_valid = True
    for group in range(group_count):
        rows = range(group * generations, (group + 1) * generations)
        read_as_none = _columns_without_values(rewards, rows) - set(models)
        leaving = {}
        for row in rows:
            fault = _fault(rewards[row], models, read_as_none)
            none_valid &= fault is not None or not any(map(math.isfinite, rewards[row]))
            why = Excluded(LEFT_OUT) if row in left_out else fault
            if why is not None:
                leaving[row] = why
            else:
                not_applicable.update(
                    column for column in read_as_none if rewards[row][column] == RETURNED_NAN
                )
        samples |= leaving
        left = [row for row in rows if row not in leaving and any(map(math.isfinite, rewards[row]))]
        if leaving and len(left) < min(2, generations):
            samples |= {row: Excluded(MaskingReason.small_group) for row in left}
            empty.append(group)
    return Selection(
        samples=samples,
        groups=tuple(empty),
        group_count=group_count,
        not_applicable=not_applicable,
        none_valid=none_valid,
    )


def _columns_without_values(rewards: Sequence[Sequence[float]], rows: range) -> set[int]:
    """The columns in which no sample of the group has a reward."""
    return {
        column
        for column in range(len(rewards[rows.start]))
        if not any(math.isfinite(rewards[row][column]) for row in rows)
    }


def _fault(
    rewards: Sequence[float], models: Collection[int], read_as_none: Collection[int]
) -> Excluded | None:
    """Why a sample has no valid reward; None if it has one, or if every function returned None for it."""
    for column, reward in enumerate(rewards):
        if column in models and not math.isfinite(reward):
            return Excluded(MaskingReason.nan if math.isnan(reward) else MaskingReason.infinite, column)
        if reward == -math.inf:
            return Excluded(MaskingReason.failed, column)
        if reward == RETURNED_NAN and column not in read_as_none:
            return Excluded(MaskingReason.nan, column)
    if RETURNED_NAN in rewards and not any(map(math.isfinite, rewards)):
        return Excluded(MaskingReason.nan, list(rewards).index(RETURNED_NAN))
    return None
