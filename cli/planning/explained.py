"""Explanations of observed memory as text of 80 columns, and as JSON. Called by `cli/plan.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.cli.planning.output import GIB, Unit, unit_of
from grpo_run.cli.text import print_paragraph
from grpo_run.runtime.planning.explaining import CLOSE, DESCRIBED, Arithmetic, Explanation, GrowthPerStep

ALIKE = 0.01
"""Share by which two figures differ at least that an observation tells apart."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What an observation is compared with.

    Attributes:
        order: single assumptions, the best fit first; the job as it is described is among them.
        observed_bytes: what was observed.
        floor: what the job cannot do without, in bytes, and how it comes about.
        pairs: two assumptions together, likewise.
        same: assumptions that make no difference to the peak.
        growth: how many steps it took, and what they may keep; None if it is not known.
    """

    order: Sequence[Explanation]
    observed_bytes: int
    floor: tuple[float, Arithmetic]
    pairs: Sequence[Explanation] = ()
    same: Sequence[Explanation] = ()
    growth: GrowthPerStep | None = None

    @property
    def unit(self) -> Unit:
        """The unit in which `plan` prints the job as it is described."""
        return unit_of(next(one.allocated_bytes for one in self.order if one.name == DESCRIBED))

    @property
    def accounted_for(self) -> bool:
        """Whether a single assumption comes close to the observation."""
        return self.order[0].distance(self.observed_bytes) <= math.log(CLOSE)


def print_explained(found: Explained) -> None:
    """Print explanations, the best fit first, with their arithmetic."""
    unit, (least, parts) = found.unit, found.floor
    for sentence in _verdict(found):
        print_paragraph(sentence)
    print_paragraph(f"Observed: {_both(found.observed_bytes, unit)}.")
    print_paragraph(
        f"No implementation of this job needs less than {_both(least, unit)}, before any activation:"
        f" {_text(parts, unit)}. A smaller figure was never right."
    )
    if found.growth is not None:
        _print_growth(found.growth, found.observed_bytes, unit)
    print("\nWhat one wrong assumption would need (the peak of torch's allocator), the best\nfit first:\n")
    _print_list(found.order, found.observed_bytes, unit)
    if found.pairs:
        print(f"\nTwo of them together that come within {100 * (CLOSE - 1):.0f} %, the best fit first:\n")
        _print_list(found.pairs, found.observed_bytes, unit)
    print()
    if found.same:
        print_paragraph(
            "Not listed, since the peak of this job is the same with them:"
            f" {'; '.join(one.assumption for one in found.same)}."
        )
    print_paragraph(
        "On top of the job as described. A fit is no proof. Compared with real runs on a CPU only, never with"
        " a GPU."
    )


def _growth_verdict(growth: GrowthPerStep, observed_bytes: int, unit: Unit) -> str:
    low, high = growth.a_step(observed_bytes)
    if not high:
        return f"No growth: the job needs {unit.said(growth.start_bytes)} from its second step on."
    fewest, most = growth.steps
    after = f"{fewest} steps" if fewest == most else f"{fewest} to {most} steps"
    grows = (
        f"From {unit.said(growth.start_bytes)} to that size in {after}, it grows by {unit.range(low, high)}"
        f" {unit.name} a step"
    )
    fitting = [one.what for one in growth.ranked(observed_bytes) if growth.fits(one, observed_bytes)]
    return (
        f"{grows}. Consistent with that, if every step keeps it:"
        f" {'; '.join(fitting) or 'nothing that is listed'}."
    )


def _print_growth(growth: GrowthPerStep, observed_bytes: int, unit: Unit) -> None:
    print("\nWhat every step may keep, the nearest to the observed growth first:\n")
    for number, one in enumerate(growth.ranked(observed_bytes), 1):
        after = growth.reached_after(one, observed_bytes)
        print_paragraph(
            f"{number:>2}. {unit.said(one.step_bytes)} a step, reached in step {after}: {one.what}", "    "
        )


def _both(size: float, unit: Unit) -> str:
    """Return a size in decimal and binary units."""
    large = unit_of(size) is GIB
    return f"{size / 1e9:.2f} GB ({unit.said(size)})" if large else f"{size / 1e6:.1f} MB ({unit.said(size)})"


def _text(arithmetic: Arithmetic, unit: Unit) -> str:
    return "".join(part if isinstance(part, str) else unit.said(part) for part in arithmetic)


def _verdict(found: Explained) -> Iterator[str]:
    if found.growth is not None:
        yield _growth_verdict(found.growth, found.observed_bytes, found.unit)
    within, best = f"{100 * (CLOSE - 1):.0f} %", found.order[0]
    if not found.accounted_for:
        yield f"No single assumption accounts for it within {within}" + (
            f"; two together do: {found.pairs[0].assumption}."
            if found.pairs
            else ", and no two do; several together may."
        )
        return
    ratio = best.allocated_bytes / found.observed_bytes
    yield f"Consistent with it ({ratio:.2f} of observed): {best.assumption}."
    if near := [
        one.assumption
        for one in found.order[1:]
        if abs(one.allocated_bytes - best.allocated_bytes) <= ALIKE * best.allocated_bytes
    ]:
        yield f"Within {100 * ALIKE:.0f} % of that, and not to be told apart from it: {'; '.join(near)}."


def explained_json(found: Explained) -> dict[str, Any]:
    """Return explanations for programs; sizes in bytes."""
    return {
        "observed_bytes": found.observed_bytes,
        "floor_bytes": round(found.floor[0]),
        "accounted_for": found.accounted_for,
        "explanations": [_one(one, found) for one in found.order],
        "pairs": [_one(one, found) for one in found.pairs],
        "without_effect": [one.name for one in found.same],
        "growth": None if found.growth is None else _growth_json(found.growth, found.observed_bytes),
    }


def _growth_json(growth: GrowthPerStep, observed_bytes: int) -> dict[str, Any]:
    return {
        "start_bytes": round(growth.start_bytes),
        "steps": list(growth.steps),
        "step_bytes": [round(size) for size in growth.a_step(observed_bytes)],
        "kept": [
            {
                "name": one.name,
                "what": one.what,
                "step_bytes": round(one.step_bytes),
                "reached_after": growth.reached_after(one, observed_bytes),
                "fits": growth.fits(one, observed_bytes),
            }
            for one in growth.ranked(observed_bytes)
        ],
    }


def _one(one: Explanation, found: Explained) -> dict[str, Any]:
    return {
        "name": one.name,
        "assumption": one.assumption,
        "arithmetic": _text(one.arithmetic, found.unit),
        "allocated_bytes": round(one.allocated_bytes),
        "ratio": one.allocated_bytes / found.observed_bytes,
    }


def _print_list(order: Sequence[Explanation], observed_bytes: int, unit: Unit) -> None:
    for number, one in enumerate(order, 1):
        ratio = one.allocated_bytes / observed_bytes
        print_paragraph(
            f"{number:>2}. {unit.said(one.allocated_bytes)} ({ratio:.2f} of observed): {one.assumption}",
            "    ",
        )
        print_paragraph(f"    {_text(one.arithmetic, unit)}", "    ")
