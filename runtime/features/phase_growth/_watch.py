"""Find phases of a step that cost more and more for the same work, and what grew with them.

Steps are given in blocks of equal length. A phase is compared with what it cost at the beginning, per work:
tokens and forward passes, also per token of context, because attention costs more with length. What makes
all phases slower, such as another job on the machine, is divided out. The rise must go on over a window of
blocks: a step to another level is not growth, and neither is a phase that has become slower and stays so.
Two views look at the same steps: one soon sees what doubles, the other later what grows by less.
Pure; fed by `rank.py`. Never a fault: it is only said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from grpo_run.runtime.features.phase_growth.events import GrowthFound
from grpo_run.watchdog.text import duration_text, join_words

CONTROL_PHASES = ("data", "generate", "score", "reward", "forward_backward", "optimizer")
"""Phases that show the speed of the machine. What callbacks do is the script's own choice."""
GROWN = 1.3
"""A count, or a reward function, has grown with a phase if it is so many times what it was."""
QUARTER_PART = 0.1
"""The part of the whole growth that comes in each quarter of a window, at least."""
NOISE = 10.0
"""What comes in each quarter, at least, in median differences of one block from the next, divided by the root
of their number: three standard deviations."""
MOST_AT_ONCE = 0.6
"""The part of a window's growth that may come between two of its sixths: more is a step to another level."""
CONTROL_PART = 0.01
"""Part of a step that a phase takes which shows the speed of the machine, at least."""
MOST_BLOCKS = 64
"""Blocks that are kept."""
LEAST_INCREASE = {
    "hooks": 8,
    "threads": 8,
    "descriptors": 32,
    "objects": 20_000,
    "collection": 0.0,
    "log": 50,
}
"""By count, what it has increased by if it has grown."""
COUNT_TEXTS = {
    "hooks": "hooks of the model, from {0:.0f} to {1:.0f}",
    "threads": "threads, from {0:.0f} to {1:.0f}",
    "descriptors": "open files, from {0:.0f} to {1:.0f}",
    "objects": "memory blocks of Python objects, from {0:.0f} to {1:.0f}",
    "collection": "garbage collection, from {0:.1%} to {1:.1%} of the time",
    "log": "log history, from {0:.0f} to {1:.0f} entries",
}


@dataclass(frozen=True, kw_only=True)
class View:
    """How steps are looked at.

    Attributes:
        block_steps: steps of a block.
        base_blocks: the first tenth of the steps is what later ones are compared with: at least and at most
            so many blocks.
        fewest_blocks: of a window.
        grown: a phase has grown if it costs so many times what it did.
        noticeable: part of a step that a growth takes, at least.
        joins: if there are too many blocks, pairs are joined; else the oldest are left out.
    """

    block_steps: int
    base_blocks: tuple[int, int]
    fewest_blocks: int
    grown: float
    noticeable: float
    joins: bool


SOON = View(block_steps=10, base_blocks=(3, 3), fewest_blocks=12, grown=2.0, noticeable=0.05, joins=False)
"""Names what doubles after 150 steps or more: short blocks are noisy, so it asks for more growth."""
LATER = View(block_steps=100, base_blocks=(2, 20), fewest_blocks=16, grown=1.3, noticeable=0.02, joins=True)
"""Names what grows slowly, after 1,800 steps or more."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of steps.

    Attributes:
        last_step: its last step.
        seconds: by phase or callback, the median over the steps in which it ran, without what ran inside it.
        shares: by phase or callback, the share of steps in which it ran.
        work: how much work of each kind was done.
        functions: by reward function, its median per step in which it ran, in seconds.
        counts: by name of `COUNT_TEXTS`, at the end of the block.
        most_hooks: the module with the most hooks.
    """

    last_step: int
    seconds: Mapping[str, float]
    shares: Mapping[str, float]
    work: Sequence[float]
    functions: Mapping[str, float]
    counts: Mapping[str, float]
    most_hooks: str = ""


class GrowthWatch:
    """The blocks of one call in one attempt, and what was found in them.

    Args:
        first_step: the step before the first block.
        target_steps: the last step of the call; 0 if not known.
        view: on the steps.
        found: the phases that were found, which other views on the same steps know too.
    """

    def __init__(self, first_step: int, target_steps: int, view: View, found: set[str]) -> None:
        self.view = view
        self._target = target_steps
        tenth = (target_steps - first_step) // (10 * view.block_steps)
        self._base_count = min(max(view.base_blocks[0], tenth), view.base_blocks[1])
        self._base_blocks: list[Block] = []
        self._base: Block | None = None
        self._base_step_seconds = 0.0
        self._windows: list[_Costs] = []
        self._together = 1
        """How many of the blocks that are added make one of `_windows`."""
        self._pending: list[_Costs] = []
        self._found = found

    def add(self, block: Block) -> GrowthFound | None:
        """Add a block; return the growth that costs most of those that were not found before."""
        if self._base is None:
            self._base_blocks.append(block)
            if len(self._base_blocks) == self._base_count:
                self._base = base = _median_block(self._base_blocks)
                self._base_blocks.clear()
                self._base_step_seconds = sum(base.seconds[name] * base.shares[name] for name in base.seconds)
            return None
        self._pending.append(_Costs(last_step=block.last_step, seconds=self._normalized(self._base, block)))
        if len(self._pending) < self._together:
            return None
        self._windows.append(_joined(self._pending))
        self._pending.clear()
        if len(self._windows) >= MOST_BLOCKS and not self.view.joins:
            del self._windows[0]
        elif len(self._windows) >= MOST_BLOCKS:
            self._windows = [_joined(self._windows[at : at + 2]) for at in range(0, len(self._windows), 2)]
            self._together *= 2
        found = [self._growth(self._base, block, phase) for phase in self._windows[-1].seconds]
        if not any(found):
            return None
        _, growth = max((one for one in found if one is not None), key=lambda one: one[0])
        self._found.add(growth.phase)
        return growth

    def _growth(self, base: Block, block: Block, phase: str) -> tuple[float, GrowthFound] | None:
        """Return what a phase costs more per step in seconds, and its growth."""
        if phase in self._found:
            return None
        before = base.seconds[phase]
        blocks = [one for one in self._windows if phase in one.seconds]
        costs = [one.seconds[phase] for one in blocks]
        for length in (len(costs), len(costs) // 2, len(costs) // 4):
            if length >= self.view.fewest_blocks and rises(
                window := costs[-length:], before, self.view.grown
            ):
                break
        else:
            return None
        now = _parts(window, 4)[-1]
        excess = (now - before) * block.shares.get(phase, base.shares[phase])
        if excess < self.view.noticeable * self._base_step_seconds:
            return None
        level = before + QUARTER_PART * (now - before)
        since = max((one.last_step for one in blocks if one.seconds[phase] < level), default=base.last_step)
        lost, costs_more = None, ""
        if (remaining := self._target - block.last_step) > 0:
            lost = remaining * (excess + excess / max(1, block.last_step - since) * remaining / 2)
            costs_more = f", which at this rate costs {duration_text(lost)} more by step {self._target}"
        grew = _grew_with(phase, base, block)
        name = f"callback {phase}" if "." in phase else f"phase {phase}"
        with_it = f"With it grew {join_words(grew)}" if grew else "Cannot tell what grew with it"
        return excess, GrowthFound(
            phase=phase,
            factor=round(now / before, 3),
            since_step=since,
            lost_seconds=lost,
            grew=grew,
            sentence=(
                f"steps get slower: {name} takes {now / before:.1f} times as long for the same work as up to"
                f" step {base.last_step}, {now:.2g} s in place of {before:.2g} s, and rises since step"
                f" {since}{costs_more}. {with_it}"
            ),
        )

    def _normalized(self, base: Block, block: Block) -> dict[str, float]:
        """Return what phases cost for the work of the beginning, on the machine as it was then."""
        # the kind of work that has grown most
        work = max(
            [1.0, *(now / before for now, before in zip(block.work, base.work, strict=True) if before)]
        )
        costs = {name: value / work for name, value in block.seconds.items() if base.seconds.get(name)}
        if any(_has_grown(name, base, block) for name in ("hooks", "threads", "collection")):
            return costs  # the process itself makes all phases slower
        least = CONTROL_PART * self._base_step_seconds
        slower = {
            name: costs[name] / base.seconds[name]
            for name in CONTROL_PHASES
            if name in costs and base.seconds[name] > least
        }
        return {
            name: cost / max(1.0, min((slower[one] for one in slower if one != name), default=1.0))
            for name, cost in costs.items()
        }


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What phases cost in one or several blocks."""

    last_step: int
    seconds: Mapping[str, float]


def _joined(blocks: Sequence[_Costs]) -> _Costs:
    names = {name for one in blocks for name in one.seconds}
    seconds = {name: fmean(one.seconds[name] for one in blocks if name in one.seconds) for name in names}
    return _Costs(last_step=blocks[-1].last_step, seconds=seconds)


def medians(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each name over the mappings that have it."""
    listed = list(values)
    names = {name for one in listed for name in one}
    return {name: median(one[name] for one in listed if name in one) for name in names}


def _median_block(blocks: Sequence[Block]) -> Block:
    return Block(
        last_step=blocks[-1].last_step,
        seconds=medians(one.seconds for one in blocks),
        shares=medians(one.shares for one in blocks),
        work=[fmean(kind) for kind in zip(*(one.work for one in blocks), strict=True)],
        functions=medians(one.functions for one in blocks),
        counts=medians(one.counts for one in blocks),
    )


def _has_grown(name: str, base: Block, block: Block) -> bool:
    before, now = base.counts.get(name, 0.0), block.counts.get(name, 0.0)
    return now > before and now >= GROWN * before and now - before >= LEAST_INCREASE[name]


def _grew_with(phase: str, base: Block, block: Block) -> tuple[str, ...]:
    texts = []
    if phase == "reward":
        texts += [
            f"reward function {name}"
            for name, seconds in block.functions.items()
            if seconds >= GROWN * base.functions.get(name, math.inf)
        ]
    for name, text in COUNT_TEXTS.items():
        # the log always grows, and only callbacks are given it
        if _has_grown(name, base, block) and (name != "log" or "." in phase):
            texts.append(text.format(base.counts.get(name, 0.0), block.counts[name]))
            if name == "hooks" and block.most_hooks:
                texts[-1] += f" (most in {block.most_hooks})"
    return tuple(texts)


def rises(window: Sequence[float], base: float, grown: float) -> bool:
    """Whether costs are `grown` times the base, and rise in all quarters of a window, not at once."""
    quarters = _parts(window, 4)
    if quarters[3] < grown * base:
        return False
    differences = [later - earlier for earlier, later in pairwise(window)]
    usual = median(differences)
    noise = median(abs(difference - usual) for difference in differences)
    least = max(QUARTER_PART * (quarters[3] - base), NOISE * noise / math.sqrt(len(window)))
    at_once = max(later - earlier for earlier, later in pairwise(_parts(window, 6)))
    return at_once <= MOST_AT_ONCE * (quarters[3] - quarters[0]) and all(
        later - earlier >= least for earlier, later in pairwise(quarters)
    )


def _parts(window: Sequence[float], count: int) -> list[float]:
    edges = [round(part * len(window) / count) for part in range(count + 1)]
    return [median(window[begin:end]) for begin, end in pairwise(edges)]
